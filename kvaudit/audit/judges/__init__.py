"""Who decides whether an answer refuses: one judge a file, blind to arm and policy, each with its card."""
