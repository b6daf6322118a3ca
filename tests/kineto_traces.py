"""Traces as torch.profiler writes them on GPUs, made by hand; times in microseconds."""

import gzip
import json


class Rank:
    """One rank's trace; its clock is ahead of the true time by `clock` microseconds."""

    def __init__(self, rank, world_size, groups=None, clock=0.0):
        self.rank, self.world_size, self.clock = rank, world_size, clock
        self.groups = groups or {"0": ("default_pg", range(world_size))}
        self.events = []

    def _add(self, cat, name, ts, dur, tid, args):
        self.events.append({
            "ph": "X", "cat": cat, "name": name, "pid": 0 if cat == "kernel" else 99, "tid": tid,
            "ts": ts + self.clock, "dur": dur, "args": args,
        })  # fmt: skip

    def kernel(self, name, ts, dur, stream=7, launch=None, cat="kernel", **args):
        """Add a kernel, with its launch on the host unless that is to be missing."""
        number = len(self.events)
        if launch is not False:
            at = ts - 1 if launch is None else launch
            self._add("cuda_runtime", "cudaLaunchKernel", at, 0.5, 1, {"correlation": number})
        args = {"stream": stream, "device": 0, "correlation": number, **args}
        self._add(cat, name, ts, dur, stream, args)

    def range(self, name, ts, dur):
        self._add("user_annotation", name, ts, dur, 1, {})

    def operator(self, name, ts, dur, tid=1):
        self._add("cpu_op", name, ts, dur, tid, {})

    def collective(self, operation, ts, dur, group="0", count=1000, stream=20, **more):
        """Add a kernel of NCCL with the arguments that recent versions of torch give it."""
        description, ranks = self.groups[group]
        args = {
            "Collective name": operation, "In msg nelems": count, "Out msg nelems": count,
            "dtype": "Float", "Group size": len(ranks), "Process Group Name": group,
            "Process Group Description": description, "Process Group Ranks": str(list(ranks)),
        }  # fmt: skip
        launch = more.pop("launch", None)
        name = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
        self.kernel(name, ts, dur, stream, launch, **(args | more))

    def send(self, ts, dur, peer, **more):
        self.collective("send", ts, dur, stream=30, **{"Dst Rank": peer} | more)

    def recv(self, ts, dur, peer, **more):
        self.collective("recv", ts, dur, stream=31, **{"Src Rank": peer} | more)

    def document(self):
        return {
            "schemaVersion": 1,
            "baseTimeNanoseconds": 10**18,
            "distributedInfo": {
                "backend": "nccl", "rank": self.rank, "world_size": self.world_size,
                "pg_config": [
                    {"pg_name": name, "pg_desc": text, "ranks": list(ranks)}
                    for name, (text, ranks) in self.groups.items()
                ],
            },
            "traceEvents": self.events,
        }  # fmt: skip

    def save(self, folder, name=None):
        path = folder / (name or f"trace_{self.rank}.json")
        text = json.dumps(self.document()).encode()
        path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
        return path


def saved(folder, *ranks):
    """Save the traces of ranks and return their folder."""
    for rank in ranks:
        rank.save(folder)
    return folder
