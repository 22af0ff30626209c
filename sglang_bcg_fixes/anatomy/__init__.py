"""SGLang's parts by release: graph runners, layer stacks, graph pools, its own flags."""
