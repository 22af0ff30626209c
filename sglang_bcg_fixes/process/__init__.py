"""The plugin in one process: what is in place, what is still to come, and what is said of both."""
