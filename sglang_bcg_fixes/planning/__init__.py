"""What can be applied, and what is: pure functions of fixes, settings and source."""
