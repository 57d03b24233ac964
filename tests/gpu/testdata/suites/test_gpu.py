# SPDX-License-Identifier: Apache-2.0
"""A file of tests of the suite that the test of suites.py makes up."""
import ctypes
import os
import unittest

PRELOADED = "LD_PRELOAD" in os.environ


class GPU(unittest.TestCase):
    before = False

    def test_1_works(self):
        cuda = ctypes.CDLL("libcuda.so.1")
        context, at, device = ctypes.c_void_p(), ctypes.c_uint64(), ctypes.c_int()
        self.assertEqual([0] * 5, [cuda.cuInit(0), cuda.cuDeviceGet(ctypes.byref(device), 0), cuda.cuCtxCreate_v2(ctypes.byref(context), 0, device),
                                   cuda.cuMemAlloc_v2(ctypes.byref(at), ctypes.c_size_t(1 << 20)), cuda.cuMemsetD8_v2(at, 7, ctypes.c_size_t(1 << 20))])
        GPU.before = True

    def test_2_differs(self):
        self.assertFalse(PRELOADED)

    def test_3_depends_on_the_first(self):
        self.assertFalse(PRELOADED and GPU.before)

    def test_4_fails(self):
        self.fail("also natively")

    @unittest.skip("also natively")
    def test_5_is_skipped(self):
        pass


class TheLast(unittest.TestCase):
    def test_ends_its_process(self):
        if PRELOADED:
            os._exit(3)
