"""`bcg-fixes`: commands for people; no server imports them."""
