"""The compressing cache for stock transformers models, and the ledger: the record of when each entry was evicted.

An entry is the key and value of one token in one KV head. A row is one sequence of the batch, and a row position is the
number of real tokens before a token in its row. A slot is a place for an entry in a layer's tensors.

``stock`` serves ``model.generate``; all other callers make an ``EvictingCache`` (``cache``). It has one ``CachedLayer``
per layer, which holds a ``Store`` of entries, or a ``QuantisedStore`` of codes, and a ``Schedule`` (``rows``).
``attention`` is the function that models call; ``evict`` has the arithmetic of eviction. The record consists of the
``ledger``, the keys that queries selected (``selection``), the experts (``routing``) and the rounding hints of codes
(``hints``).

Every class that holds data of each row has two methods. ``reindex(rows)`` keeps the rows that the index ``rows`` names,
in its order; a row that is named twice is kept twice. ``join(other)`` appends the rows of another batch.

Shapes in this package: B rows, L layers, H KV heads with G query heads each, Q queries, K entries, C slots, T tokens, D
channels of a head; M mixture-of-experts blocks with k experts per token. Lower-case b counts the rows of a part of the
batch.
"""
