// SPDX-License-Identifier: Apache-2.0
#include "rm_object.h"

#include <stdarg.h>
#include <stdatomic.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "compiler.h"
#include "rm_abi.h"

static _Atomic(nvs_rm_ioctl *) next;

void nvs_rm_set_next(nvs_rm_ioctl *fn)
{
	atomic_store(&next, fn);
}

static int kernel(int fd, unsigned long request, ...)
{
	va_list list;
	void *arg;

	va_start(list, request);
	arg = va_arg(list, void *);
	va_end(list);
	return (int)syscall(SYS_ioctl, fd, request, arg);
}

int rm_next(int fd, unsigned long request, void *arg)
{
	nvs_rm_ioctl *fn = atomic_load_explicit(&next, memory_order_relaxed), *none = NULL;

	if (nvs_unlikely(!fn)) {
		fn = nvs_rm_find_next ? nvs_rm_find_next() : NULL;
		fn = fn ? fn : kernel;
		atomic_compare_exchange_strong(&next, &none, fn);
	}
	return fn(fd, request, arg);
}

enum nvs_rm_result rm_control(const struct rm_target *t, uint32_t object, uint32_t command, void *params,
			      uint32_t size, uint32_t *status)
{
	struct rm_control c = { .client = t->client, .object = object, .command = command,
				.params = (uintptr_t)params, .params_size = size };

	if (!nvs_descriptor_is(&t->via) || rm_next(t->via.fd, RM_CONTROL, &c) != 0)
		return NVS_RM_LOST;
	*status = c.status;
	return c.status ? NVS_RM_REFUSED : NVS_RM_OK;
}
