"""Replay of recorded rollouts: a parallel forward in which every query sees the entries it saw while sampling.

``attention`` computes the replayed attention. ``learner_pass`` is the forward pass that uses it for training and for
verification, ``shadow`` the same for calls of a stock transformers model. ``interchange`` and ``stacks`` read rollouts
of other engines; ``rollout_checks`` and ``ranking_check`` test a rollout against its compression policy.
"""
