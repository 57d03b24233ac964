// SPDX-License-Identifier: Apache-2.0
#ifndef NVSHARE_LOG_H
#define NVSHARE_LOG_H

#include <stdbool.h>

extern bool nvs_debug; /* NVSHARE_DEBUG=1 */

/* Reads NVSHARE_DEBUG. */
void nvs_log_init(void);

/* A line on standard error; only under NVSHARE_DEBUG=1. Keeps errno. */
void nvs_log(const char *format, ...) __attribute__((format(printf, 1, 2)));

#define nvs_debugf(...) do { if (nvs_debug) nvs_log(__VA_ARGS__); } while (0)

#endif
