"""What SGLang looks like in each release: runners, stacks of layers, pools of graphs, its own flags."""
