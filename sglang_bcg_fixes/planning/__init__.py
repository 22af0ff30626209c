"""Decisions: pure functions of fixes, settings and source."""
