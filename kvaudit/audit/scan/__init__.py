"""Find KV compression in rollout and serving configurations, read as data; and a questionnaire for vendors."""
