"""The self-check: before a server takes its first request, replayed prefills against the same code run eagerly."""
