"""Speed, as ratios measured in one run: ours, what a user would do instead, and the limit of the machine."""
