"""From a model to graded answers.

``model`` loads one without running its code, after ``weights`` and ``gguf_header`` have looked at its files; ``chat``
makes tokens of messages, through the strangers' templates that ``rendering`` keeps apart. ``conversations`` plays items
of suites, ``sampler`` opens an ``episode`` for their prompts, which draws (``decoding``) with one living cache;
``degenerate`` tells answers that say nothing.
"""
