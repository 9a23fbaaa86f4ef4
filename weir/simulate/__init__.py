"""Discrete-event simulation that drives Weir's own policy and balance controller under virtual time.

``events``      the queue of events and the clock
``models``      how long a prefill or a decode step takes: profile, DistServe, Splitwise
``traffic``     who asks what, when: synthetic, phases, recorded traces
``worker``      one worker: prefill batches, continuous batching, both at once
``cluster``     router and workers: places with the production ``Policy``, moves KV, loses workers
``balancing``   the production ``BalanceController`` as it would be driven in a cluster
``metrics``     what came of the requests
``scenario``    one run from its description
``replay``      step by step under the production engine scheduler, for comparison with measured servers
``plot``        SVG
"""
