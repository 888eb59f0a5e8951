"""What the sampler saw, seen again, and recorded rollouts held to the policy they name.

``attention`` is one pass under a record, with ``codes`` where the cache had quantised; ``learner_pass`` is what trains
and verifies, ``shadow`` the door for stock models. ``recorded`` holds rollouts of a file to a model, ``schedule_check``
to when and how much the policy evicts, ``ranking_check`` to what it would choose.
``interchange`` reads rollouts of other engines, whose ``interchange_form`` is docs/rollout-files.md's.
"""
