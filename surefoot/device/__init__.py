"""Do: one plan in, one outcome out.

What the libraries below torch read when they load is set here, before torch is imported, unless it is set already:

* threads that wait without spinning: a spinning thread beside a busy process made small products ten times slower;
* a bound on oneDNN's kernels: it keeps one, with its scratch memory, per weight's shape and number of rows that it met,
  and 600 different numbers grew the process by 2.4 GB with the default of 1,024. `ops.linear` makes do with 26 numbers,
  of which the small ones are met at start and have to stay;
* one growing segment of GPU memory, so that steps of changing sizes do not fragment it.
"""

import os

for _name, _value in (
    ("OMP_WAIT_POLICY", "PASSIVE"),
    ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "128"),
    ("LRU_CACHE_CAPACITY", "64"),
    ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"),
):
    os.environ.setdefault(_name, _value)
