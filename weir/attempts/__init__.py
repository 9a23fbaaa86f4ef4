"""What both legs of a request share in a worker: the desk of its attempts, the sessions, the wire.

    wire.py   gRPC stream  ─►  leg.py  event loop, sessions, timers  ─►  desk.py  attempts, news, orders (pure)

``weir.services.prefill`` and ``weir.services.decode`` add what each role is about: leases and tickets there, KV reads
and first tokens here.
"""
