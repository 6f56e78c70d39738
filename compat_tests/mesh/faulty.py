"""A process of a run in which something goes wrong: `python faulty.py FAULT ADDRESS COUNT NUMBER TIMEOUT`."""

import multiprocessing
import os
import signal
import sys
import time

from trl_jax.mesh import joining

fault, address, count, number, timeout = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])
joining.TELL = 1.0  # seconds
if fault == "joining":  # needs no JAX, whose import takes seconds
    joining.call_roll(address, count, number, timeout)
    sys.exit("joined")

import numpy as np  # noqa: E402
from jax.experimental import multihost_utils  # noqa: E402

from trl_jax.mesh import processes, watch  # noqa: E402

watch.GRACE, watch.WAIT, watch._PUBLISH = 3, 2, 1
processes.join(address, count, number, timeout)


def step(name: str) -> None:
    processes.reached(name)
    multihost_utils.process_allgather(np.ones(3))


with processes.together("training"):
    step("step 1")
    print("began", flush=True)
    if fault == "network":
        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
        child.start()
        child.terminate()
        child.join()
        print("A child ended with", child.exitcode, flush=True)
        time.sleep(6 * number)  # process 1 is late
        step("step 2")
        watch._NOTICE = 1
        raise ValueError("UNKNOWN: Gloo AllGather failed: Read error [10.0.0.2]:17843: Connection timed out")
    time.sleep(2)  # until the lifelines have connected
    if fault == f"kill {number}":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault in ("kill 0", "kill 1"):
        step("step 2")
    if fault == "unplugged" and number == 0:
        step("step 2")
    if fault == "unplugged":
        time.sleep(100)
    if fault == "kill in python" and number == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "kill in python":
        time.sleep(100)  # as in a hanging collective on a GPU
