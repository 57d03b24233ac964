// SPDX-License-Identifier: Apache-2.0
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "log.h"

bool nvs_debug;

void nvs_log_init(void)
{
	const char *s = secure_getenv("NVSHARE_DEBUG");

	nvs_debug = s && *s && strcmp(s, "0") != 0;
}

void nvs_log(const char *format, ...)
{
	int saved = errno;
	char line[512];
	va_list args;
	int n, m;

	n = snprintf(line, sizeof(line), "nvshare[%d]: ", (int)getpid());
	va_start(args, format);
	m = vsnprintf(line + n, sizeof(line) - (size_t)n - 1, format, args);
	va_end(args);
	if (m > 0) {
		n += m;
		if (n > (int)sizeof(line) - 2)
			n = (int)sizeof(line) - 2;
		line[n++] = '\n';
		/* Not write(): that is a cancellation point, and locks are held. */
		if (syscall(SYS_write, 2, line, (size_t)n) < 0) {
			/* nowhere to tell */
		}
	}
	errno = saved;
}
