"""Do: one plan in, one outcome out.

What the libraries below torch read when they load is set here, before torch is imported, unless it is set already:

* threads that wait without spinning: a spinning thread beside a busy process made small products ten times slower;
* a bound on oneDNN's kernels: it keeps one, with its scratch memory, per number of rows that it ever met, and prompts
  of 600 different lengths grew the process by 2.4 GB with the default of 1,024;
* one growing segment of GPU memory, so that steps of changing sizes do not fragment it.
"""

import os

for _name, _value in (
    ("OMP_WAIT_POLICY", "PASSIVE"),
    ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64"),
    ("LRU_CACHE_CAPACITY", "64"),
    ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"),
):
    os.environ.setdefault(_name, _value)
