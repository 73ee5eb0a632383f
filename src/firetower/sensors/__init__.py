"""Panel, checks and op-level recording: what turns a tensor into a first-bad word."""
