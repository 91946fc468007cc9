"""The other sides: training loops as they are written without the framework, for the same update.

Each has a `Loop(case, state=None, folder=None)` that trains on the batches of
`haikutrain.ArrayDataset` with seed 0, `run(steps)`, which returns the seconds until the devices
have done them, and `result()`, the state without a device axis, on the host.
"""
