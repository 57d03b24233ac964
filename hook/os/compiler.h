// SPDX-License-Identifier: Apache-2.0
/* compiler.h: what the compiler is told about functions and branches. */
#ifndef NVSHARE_COMPILER_H
#define NVSHARE_COMPILER_H

#define NVS_EXPORT __attribute__((visibility("default")))
#define nvs_likely(x)   __builtin_expect(!!(x), 1)
#define nvs_unlikely(x) __builtin_expect(!!(x), 0)

#endif
