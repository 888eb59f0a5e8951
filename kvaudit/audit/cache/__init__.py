"""The compressing cache: on stock transformers models, evicting by a policy, with its ledger of what left when.

``stock`` is the door for ``model.generate``; everybody else makes an ``EvictingCache`` (``cache``), which holds one
``CachedLayer`` per layer, each with a ``Store`` of entries (as codes: ``quantised``) and what is kept ``beside`` them.
``attention`` is what a model calls, ``evict`` what stays. The record has the ``ledger``, the keys that queries chose
(``selection``) and the experts (``routing``). ``layers``, ``rotary`` and ``linear`` know the model, ``rows`` the batch.
"""
