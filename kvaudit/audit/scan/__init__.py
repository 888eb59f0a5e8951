"""Find KV compression in rollout and serving configurations, without running them; and a questionnaire for vendors."""
