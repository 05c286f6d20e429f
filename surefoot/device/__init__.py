"""Do: one plan in, one outcome out.

What the libraries below torch read when they load is set here, before torch is imported, unless it is set already:
threads that wait without spinning (a spinning thread beside a busy process made small products ten times slower), and
a bound on oneDNN's kernels. It keeps one, with its scratch memory, per number of rows that it ever met: serving prompts
of 600 different lengths grew the process by 2.4 GB with the default of 1,024 kernels, and by 0.1 GB with 64.
"""

import os

for _name, _value in (
    ("OMP_WAIT_POLICY", "PASSIVE"),
    ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64"),
    ("LRU_CACHE_CAPACITY", "64"),
):
    os.environ.setdefault(_name, _value)
