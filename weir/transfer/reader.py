"""The thread that reads: it owns every NIXL object of a worker, and no other thread touches one.

A post over shared memory copies in the caller's time, and completion has to be asked for; both would stall an
event loop or a step loop. The thread sleeps when nothing is under way, and polls with a growing pause when
something is.

    submit ─► waiting ─► data posted ─► guard posted ─► proof ─► settled
                 └────────────┴─── timeout, error, peer dropped ──► settled void

Data goes in segments, so that one is checksummed (on another thread) while the next is read.

Two agents: the *owner* exports the pool and the guard table and is never restarted; the *reader* posts. UCX
cannot recall a posted read: after releasing the handle and removing the peer, bytes still landed when a stopped
peer went on (seen on TCP). Only destroying the agent that posted it stops it for certain. So a read that must
end while it is in flight resets the reader: its other reads end void too, and peers are connected anew on
their next read. That is what lets ``KvTransfer.read`` promise that no byte lands after it has ended.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from weir.clock import Clock
from weir.errors import InternalError, KvReadVoid, TransferUnavailable, WeirError
from weir.ids import WorkerKey
from weir.kvcache.pool import KvPool
from weir.transfer import ucx
from weir.transfer.plan import (
    Completion,
    ReadReport,
    Run,
    decode_completion,
    encode_completion,
    merge_runs,
    segments,
)
from weir.transfer.ticket import GUARD_ENTRY_BYTES, GuardEntry, PeerDescriptor, VoidReason, prove
from weir.transfer.under_way import Outcome, Posted, Probe, Read

MAX_ACTIVE_READS = 8
_SPIN_S = 50e-6
_FIRST_PAUSE_S = 50e-6
_LAST_PAUSE_S = 1e-3
_NOTIFICATION_PAUSE_S = 2e-3
_RENEWAL_PAUSE_S = 2.0

log = logging.getLogger(__name__)


class _ReaderLost(Exception):
    """The reader agent cannot be ended or started again: the thread ends."""


class ReadThread:
    """Runs reads into ``pool``. ``start`` raises TransferUnavailable; the rest is safe from any thread."""

    def __init__(
        self,
        pool: KvPool,
        name: str,
        clock: Clock,
        max_descriptor_bytes: int,
        on_completion: Callable[[Completion], None],
    ) -> None:
        self._pool = pool
        self._name = name
        self._clock = clock
        self._max_descriptor_bytes = max_descriptor_bytes
        self._on_completion = on_completion
        self._wake = threading.Condition()
        self._commands: deque[Callable[[], None]] = deque()
        self._stopping = False
        self._ended = False
        self._watching = False
        self._waiting: deque[Read] = deque()
        self._active: list[Read] = []
        self._probes: list[Probe] = []
        self._owner: Any = None
        self._reader: Any = None
        self._resets = 0
        self._renewed_s = 0.0
        self._remote_names: dict[WorkerKey, str] = {}
        self._transports: dict[WorkerKey, str] = {}
        self._transport_by_host: dict[str, str] = {}
        entries = np.zeros((MAX_ACTIVE_READS, pool.num_blocks, 2), dtype="<u8")
        self._scratch = entries
        self._probe_row = np.zeros((1, 2), dtype="<u8")
        self._free_slots = list(range(MAX_ACTIVE_READS))
        self._hasher = ThreadPoolExecutor(1, "kv-checksum")
        self._thread = threading.Thread(target=self._main, name="kv-read", daemon=True)
        self.agent_metadata = b""

    # -- from any thread --------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the agents, then the thread."""
        self._owner = ucx.start_agent(self._name)
        self._register_exports(self._owner)
        self.agent_metadata = bytes(self._owner.get_agent_metadata())
        self._start_reader()
        self._thread.start()

    def submit(self, read: Read) -> None:
        """Begin ``read``; it is settled exactly once."""
        if not self._post(lambda: self._waiting.append(read)):
            read.settle(TransferUnavailable("the KV read thread has ended"))

    def cancel(self, read: Read) -> None:
        """Do no more for ``read`` than the memory's safety asks for; it is settled as always."""
        read.cancelled = True
        self._post(lambda: None)

    def connect(self, probe: Probe) -> None:
        """Begin ``probe``; it is settled exactly once."""
        if not self._post(lambda: self._probes.append(probe)):
            probe.settle(TransferUnavailable("the KV read thread has ended"))

    def drop_peer(self, worker: WorkerKey, done: Callable[[], None]) -> None:
        """End ``worker``'s reads void and drop its registrations; then call ``done`` on the thread."""
        if not self._post(lambda: self._drop_peer(worker, done)):
            done()

    def watch(self, watching: bool) -> None:
        """Whether to look for notifications."""
        if self._watching != watching:
            self._watching = watching
            self._post(lambda: None)

    def stop(self) -> None:
        """End everything and wait for the thread."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join()

    def _post(self, command: Callable[[], None]) -> bool:
        """Have ``command`` run on the thread; False if the thread has ended."""
        with self._wake:
            if self._ended:
                return False
            self._commands.append(command)
            self._wake.notify()
            return True

    # -- the loop ---------------------------------------------------------------------------------------

    def _main(self) -> None:
        try:
            while not self._stopping:
                self._run_commands()
                self._admit()
                for probe in list(self._probes):
                    self._advance_probe(probe)
                for read in list(self._active):
                    self._guarded(read, self._advance)
                self._collect_notifications()
                self._sleep()
        except Exception:
            log.exception("the KV read thread failed")
        finally:
            self._shut_down()

    def _run_commands(self) -> None:
        while self._commands:
            self._commands.popleft()()

    def _sleep(self) -> None:
        """Until a command comes, or the next poll is due."""
        pause_s = self._pause_s()
        if pause_s == 0.0:
            return
        with self._wake:
            if not self._commands and not self._stopping:
                self._wake.wait(pause_s)

    def _pause_s(self) -> float | None:
        if not self._active:
            if self._waiting:
                return 0.0
            if self._probes:
                return _LAST_PAUSE_S
            return _NOTIFICATION_PAUSE_S if self._watching else None
        return min(read.pause_s for read in self._active)

    def _collect_notifications(self) -> None:
        if not self._watching:
            return
        for sender, payloads in self._owner.get_new_notifs().items():
            for payload in payloads:
                done = decode_completion(bytes(payload))
                if done is None:
                    log.warning("notification of %s is not a completion: %r", sender, payload[:64])
                else:
                    self._on_completion(done)

    def _shut_down(self) -> None:
        with self._wake:
            self._ended = True
        self._run_commands()
        for read in self._active:
            self._forget_handles(read)
        for probe in list(self._probes):
            self._end_probe(probe, TransferUnavailable("the transfer was closed"))
        unfinished = [*self._waiting, *self._active]
        self._waiting.clear()
        self._active.clear()
        self._hasher.shutdown()
        self._owner = None
        try:
            self._destroy_reader()
        except InternalError:
            log.critical("%d KV reads cannot be ended safely", len(unfinished), exc_info=True)
            return
        for read in unfinished:
            read.settle(KvReadVoid(VoidReason.TRANSPORT.value, "the transfer was closed"))

    # -- first contact ----------------------------------------------------------------------------------

    def _advance_probe(self, probe: Probe) -> None:
        try:
            if probe.handle is None:
                self._post_probe(probe)
            state = self._reader.check_xfer_state(probe.handle)
            if state == "DONE":
                self._transport(probe.peer)
                self._end_probe(probe, None)
            elif state == "ERR":
                raise TransferUnavailable("the first read is in error")
            elif self._clock.monotonic_s() > probe.deadline_s:
                raise TransferUnavailable("the first read did not end in time")
        except _ReaderLost:
            raise
        except Exception as error:
            detail = f"{probe.peer.worker} cannot be read: {type(error).__name__}: {error}"
            self._end_probe(probe, TransferUnavailable(detail))
            self._remove_remote(probe.peer.worker)

    def _post_probe(self, probe: Probe) -> None:
        # Into a row that nothing else uses: should it land after its end, it does no harm.
        peer = probe.peer
        remote, reader = self._remote_name(peer), self._reader
        here = [(self._probe_row.ctypes.data, GUARD_ENTRY_BYTES, 0)]
        there = [(peer.guard_base, GUARD_ENTRY_BYTES, 0)]
        probe.handle = reader.initialize_xfer(
            "READ",
            reader.get_xfer_descs(here, "DRAM"),
            reader.get_xfer_descs(there, "DRAM"),
            remote,
        )
        reader.transfer(probe.handle)

    def _end_probe(self, probe: Probe, outcome: WeirError | None) -> None:
        self._probes.remove(probe)
        if probe.handle is not None:
            self._release(probe.handle)
            probe.handle = None
        probe.settle(outcome)

    # -- one read ---------------------------------------------------------------------------------------

    def _admit(self) -> None:
        now = self._clock.monotonic_s()
        for read in [read for read in self._waiting if read.cancelled or now > read.deadline_s]:
            self._waiting.remove(read)
            reason = VoidReason.TRANSPORT if read.cancelled else VoidReason.TIMEOUT
            read.settle(KvReadVoid(reason.value, "ended before it was posted"))
        while self._waiting and self._free_slots:
            read = self._waiting.popleft()
            read.slot = self._free_slots.pop()
            self._active.append(read)
            self._plan_data(read)

    def _guarded(self, read: Read, step: Callable[[Read], None]) -> None:
        try:
            step(read)
        except _ReaderLost:
            raise
        except KvReadVoid as void:
            self._finish(read, void)
        except Exception as error:
            self._fail(read, error)

    def _advance(self, read: Read) -> None:
        """Post what is not posted, ask for what is, and set when to come back."""
        if read not in self._active:
            return  # a reset has ended it
        if read.cancelled:
            read.unposted.clear()
        progress = self._post_data(read) if read.unposted else False
        for posted in list(read.posted):
            progress |= self._poll(read, posted)
        now = self._clock.monotonic_s()
        if not read.posted and not read.unposted:
            self._phase_done(read)
        elif now > read.deadline_s and not read.posted:
            raise KvReadVoid(VoidReason.TIMEOUT.value, f"{len(read.unposted)} segments were not posted in time")
        elif now > read.deadline_s:
            self._reset(f"a read from {read.peer.worker} did not end in time", late=read)
        elif progress or read.unposted:
            read.polled_s, read.pause_s = now, 0.0
        elif now - read.polled_s > _SPIN_S:
            read.pause_s = min(max(read.pause_s * 2, _FIRST_PAUSE_S), _LAST_PAUSE_S)

    def _poll(self, read: Read, posted: Posted) -> bool:
        """Whether ``posted`` is done; its blocks go on to be checksummed."""
        state = self._reader.check_xfer_state(posted.handle)
        if state == "ERR":
            raise TransferUnavailable("the transfer is in error")
        if state != "DONE":
            return False
        read.posted.remove(posted)
        self._release(posted.handle)
        if posted.blocks and self._pool.checksums_enabled and not read.cancelled:
            read.checksums.append((posted.blocks, self._hasher.submit(self._pool.checksums, posted.blocks)))
        return True

    def _plan_data(self, read: Read) -> None:
        block_bytes = self._pool.layout.block_bytes
        runs = merge_runs(
            [(ref.block, block) for ref, block in read.destinations],
            block_bytes=block_bytes,
            max_descriptor_bytes=self._max_descriptor_bytes,
        )
        read.descriptors = len(runs)
        read.unposted.extend(segments(runs, block_bytes=block_bytes, max_segment_bytes=self._max_descriptor_bytes))
        read.begun_s = self._clock.monotonic_s()

    def _post_data(self, read: Read) -> bool:
        """Post one segment: over shared memory this copies it, so other reads get their turn in between."""
        runs = read.unposted.popleft()
        here = (self._pool.base, self._memory, self._device_id)
        there = (read.peer.pool_base, read.peer.memory, read.peer.device_id)
        started_s = self._clock.monotonic_s()
        self._post_runs(read, runs, self._pool.layout.block_bytes, here, there)
        read.post_s += self._clock.monotonic_s() - started_s
        return True

    def _post_guard(self, read: Read) -> None:
        sources = [(ref.block, index) for index, (ref, _) in enumerate(read.destinations)]
        runs = merge_runs(sources, block_bytes=GUARD_ENTRY_BYTES)
        here = (self._scratch[read.slot].ctypes.data, "DRAM", 0)
        read.reads_guard = True
        read.polled_s = self._clock.monotonic_s()
        self._post_runs(read, runs, GUARD_ENTRY_BYTES, here, (read.peer.guard_base, "DRAM", 0))

    def _post_runs(
        self,
        read: Read,
        runs: Sequence[Run],
        unit_bytes: int,
        here: tuple[int, str, int],
        there: tuple[int, str, int],
    ) -> None:
        local = [(here[0] + run.dst * unit_bytes, run.count * unit_bytes, here[2]) for run in runs]
        remote = [(there[0] + run.src * unit_bytes, run.count * unit_bytes, there[2]) for run in runs]
        name, reader = self._remote_name(read.peer), self._reader
        handle = reader.initialize_xfer(
            "READ",
            reader.get_xfer_descs(local, here[1]),
            reader.get_xfer_descs(remote, there[1]),
            name,
        )
        blocks = [] if read.reads_guard else [run.dst + i for run in runs for i in range(run.count)]
        read.posted.append(Posted(handle, blocks))
        if reader.transfer(handle) == "ERR":
            raise TransferUnavailable("the transfer was refused")

    def _phase_done(self, read: Read) -> None:
        """Nothing of ``read`` is in flight: go from the data to the guard, or from the guard to the proof."""
        if read.cancelled:
            raise KvReadVoid(VoidReason.TRANSPORT.value, "cancelled")
        if read.reads_guard:
            self._finish(read, self._prove(read))
            return
        read.data_done_s = self._clock.monotonic_s()
        self._post_guard(read)
        self._advance(read)

    def _prove(self, read: Read) -> ReadReport:
        """Prove the data against the guard that was read after it; raises KvReadVoid."""
        guard_done_s = self._clock.monotonic_s()
        rows = self._scratch[read.slot, : len(read.destinations)].tolist()
        guards = [GuardEntry(generation, checksum) for generation, checksum in rows]
        refs = [ref for ref, _ in read.destinations]
        own = [block for _, block in read.destinations]
        prove(refs, guards, None)
        if self._pool.checksums_enabled:
            found: dict[int, int] = {}
            for blocks, checksums in read.checksums:
                found.update(zip(blocks, checksums.result(), strict=True))
            prove(refs, guards, [found[block] for block in own])
        proven_s = self._clock.monotonic_s()
        if read.notify:
            self._notify_owner(read)
        transport = self._transport(read.peer)
        return ReadReport(
            bytes=len(own) * self._pool.layout.block_bytes,
            blocks=len(own),
            descriptors=read.descriptors,
            transport=transport,
            post_s=read.post_s,
            data_s=read.data_done_s - read.begun_s,
            guard_s=guard_done_s - read.data_done_s,
            checksum_s=proven_s - guard_done_s,
            total_s=proven_s - read.started_s,
        )

    def _notify_owner(self, read: Read) -> None:
        payload = encode_completion(Completion(read.ticket.lease_id, read.ticket.key))
        try:
            self._reader.send_notif(self._remote_name(read.peer), payload)
        except Exception as error:
            # The data is proven all the same; the lease ends by another way or by its deadline.
            log.warning("completion of lease %d was not sent: %s", read.ticket.lease_id, error)

    def _finish(self, read: Read, outcome: Outcome) -> None:
        """Settle ``read``, of which nothing is in flight."""
        assert not read.posted
        self._active.remove(read)
        self._free_slots.append(read.slot)
        read.settle(outcome)

    def _fail(self, read: Read, error: Exception) -> None:
        """``read`` met an error of the transport."""
        detail = f"{read.peer.worker}: {type(error).__name__}: {error}"
        if "RemoteDisconnect" in type(error).__name__ or not read.posted:
            # UCX has closed the endpoint by force, or nothing was posted: nothing is in flight.
            self._forget_handles(read)
            self._remove_remote(read.peer.worker)
            self._finish(read, KvReadVoid(VoidReason.TRANSPORT.value, detail))
        else:
            self._reset(detail)

    def _forget_handles(self, read: Read) -> None:
        for posted in read.posted:
            self._release(posted.handle)
        read.posted.clear()

    def _release(self, handle: Any) -> None:
        try:
            handle.release()
        except Exception as error:
            log.warning("a transfer handle could not be released: %s", error)
        # A handle keeps its agent alive, and a frame may still keep the handle.
        handle._agent = None

    # -- peers and agents -------------------------------------------------------------------------------

    @property
    def _memory(self) -> str:
        return "DRAM" if self._pool.device.type == "cpu" else "VRAM"

    @property
    def _device_id(self) -> int:
        return self._pool.device.index or 0

    def _register_exports(self, agent: Any) -> None:
        agent.register_memory([(self._pool.base, self._pool.nbytes, self._device_id, "")], self._memory)
        guard = self._pool.guard
        agent.register_memory([(guard.base, guard.nbytes, 0, "")], "DRAM")

    def _start_reader(self) -> None:
        self._reader = ucx.start_agent(f"{self._name}/r{self._resets}")
        self._reader.register_memory([(self._pool.base, self._pool.nbytes, self._device_id, "")], self._memory)
        for rows in (self._scratch, self._probe_row):
            self._reader.register_memory([(rows.ctypes.data, rows.nbytes, 0, "")], "DRAM")

    def _destroy_reader(self) -> None:
        """Returns when UCX's worker is gone, and with it all that could still land. InternalError if not."""
        reader, self._reader = self._reader, None
        if reader is not None:
            ucx.destroy_agent(reader)

    def _remote_name(self, peer: PeerDescriptor) -> str:
        """What the reader calls ``peer``; may start another reader, so ask before taking it."""
        name = self._remote_names.get(peer.worker)
        if name is None:
            added = self._add_remote(peer)
            name = added.decode() if isinstance(added, bytes) else str(added)
            self._remote_names[peer.worker] = name
            if name != str(peer.worker):
                self._remove_remote(peer.worker)
                raise TransferUnavailable(f"metadata given for {peer.worker} is that of {name}")
        return name

    def _add_remote(self, peer: PeerDescriptor) -> Any:
        try:
            return self._reader.add_remote_agent(peer.agent_metadata)
        except Exception as error:
            if not self._renewable():
                raise
            reason = f"{type(error).__name__}: {error}"
        # UCX looks for network devices only when an agent starts: one that started while a cable was out would find no
        # way to anybody for ever.
        log.warning("KV reader started anew, %s was not reached: %s", peer.worker, reason)
        self._renewed_s = self._clock.monotonic_s()
        self._end_reader()
        self._begin_reader()
        return self._reader.add_remote_agent(peer.agent_metadata)

    def _renewable(self) -> bool:
        """Whether nothing is in flight on the reader, and it was not renewed just now."""
        busy = any(read.posted for read in self._active) or any(probe.handle is not None for probe in self._probes)
        return not busy and self._clock.monotonic_s() >= self._renewed_s + _RENEWAL_PAUSE_S

    def _remove_remote(self, worker: WorkerKey) -> None:
        name = self._remote_names.pop(worker, None)
        self._transports.pop(worker, None)
        if name is None:
            return
        try:
            self._reader.remove_remote_agent(name)
        except Exception as error:
            log.warning("peer %s could not be removed: %s", name, error)

    def _drop_peer(self, worker: WorkerKey, done: Callable[[], None]) -> None:
        for read in [read for read in self._waiting if read.peer.worker == worker]:
            self._waiting.remove(read)
            read.settle(KvReadVoid(VoidReason.TRANSPORT.value, f"{worker} was disconnected"))
        for probe in [probe for probe in self._probes if probe.peer.worker == worker]:
            self._end_probe(probe, TransferUnavailable(f"{worker} was disconnected"))
        if any(read.peer.worker == worker for read in self._active):
            self._reset(f"{worker} was disconnected")
        self._remove_remote(worker)
        done()

    def _reset(self, why: str, late: Read | None = None) -> None:
        """Destroy the agent that posted, so that nothing in flight can land; then settle its reads void.

        Raises _ReaderLost when that fails: reads that could not be made safe are then never settled.
        """
        log.warning("KV reader reset, %d reads end void: %s", len(self._active), why)
        ended, self._active = self._active, []
        for read in ended:
            read.unposted.clear()
            self._forget_handles(read)
        for probe in list(self._probes):
            self._end_probe(probe, TransferUnavailable(why))
        self._end_reader()
        self._free_slots = list(range(MAX_ACTIVE_READS))
        # The late one first: a sequence reports the first of its void reads, and is to report why.
        for read in sorted(ended, key=lambda read: read is not late):
            reason = VoidReason.TIMEOUT if read is late else VoidReason.TRANSPORT
            read.settle(KvReadVoid(reason.value, why))
        self._begin_reader()

    def _end_reader(self) -> None:
        """Destroy the reader, of which no handle may be left. Raises _ReaderLost."""
        self._remote_names.clear()
        try:
            self._destroy_reader()
        except InternalError as error:
            raise _ReaderLost(str(error)) from error

    def _begin_reader(self) -> None:
        """Start the next one. Raises _ReaderLost."""
        self._resets += 1
        try:
            self._start_reader()
        except TransferUnavailable as error:
            raise _ReaderLost(str(error)) from error

    def _transport(self, peer: PeerDescriptor) -> str:
        """What carries reads from ``peer``: from UCX's own tables, written when it first chose."""
        known = self._transports.get(peer.worker)
        if known is not None:
            return known
        found = ucx.transport_in(ucx.new_log_text(), self._pool.layout.block_bytes)
        if found is not None:
            self._transport_by_host[peer.host_id] = found
        transport = self._transport_by_host.get(peer.host_id, ucx.UNRESOLVED)
        self._transports[peer.worker] = transport
        log.info("KV reads from %s go over %s", peer.worker, transport)
        return transport
