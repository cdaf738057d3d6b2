"""Where weights come from: a small model that really trains, or a checkpoint folder."""
