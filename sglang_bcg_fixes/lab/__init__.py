"""Real servers on a GPU: whether answers are right, and times; no server imports it unasked."""
