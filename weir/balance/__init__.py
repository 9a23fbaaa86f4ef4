"""The arithmetic of balance between the pools: pure functions, one file per question.

``capacity``   work per request, balanced split, whole workers, SLO sizing, memory
``fabric``     KV bytes per token, whether the network carries the flow, duplication, chunking
``rideout``    whether a resize lands before the stock hits an end
``queueing``   TTFT of a prefill worker under Poisson arrivals
"""
