"""The lab: replay campaigns, statistics, discriminating tests, verdicts."""
