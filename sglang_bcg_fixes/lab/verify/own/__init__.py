# SPDX-License-Identifier: Apache-2.0
"""`bcg-fixes verify -- COMMAND`: the user's own server with the fixes, without them, and without replays."""
