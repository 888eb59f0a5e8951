"""Replay of recorded rollouts: a parallel forward in which every query sees the entries it saw while sampling.

``attention`` is the replay itself, ``learner_pass`` the pass that trains and verifies, ``shadow`` the same for stock
models. ``interchange`` and ``stacks`` read rollouts of other engines; ``rollout_checks`` and ``ranking_check`` test a
rollout against its policy.
"""
