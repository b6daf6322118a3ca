"""A schedule replayed by real torch processes, and what it takes beside what was predicted.

`job` turns a scenario into what each rank does; `launch` starts the ranks, each of them `worker`;
`calibrate` measures op times apart from any replay; `clock` rebuilds a step from what its actions
took, without the engines; `predict` runs the engines on measured times; `compare` sets them side by
side. torch is imported by the processes of the ranks only.
"""
