// SPDX-License-Identifier: Apache-2.0
/*
 * rm_ioctl.c: the exported ioctl. Everything is passed on as it came; a request that is not the RM's
 * costs a comparison. The RM's own is noted after it succeeded, so that a wrong pointer is the
 * driver's to refuse.
 */
#include <errno.h>
#include <stdarg.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include "compiler.h"
#include "log.h"
#include "rm_abi.h"
#include "rm_object.h"

static void note_alloc(int fd, const struct rm_alloc *a, uint32_t status, uint32_t flags)
{
	uint32_t engine = 0;

	if (status)
		return;
	if (a->class == RM_CLASS_GROUP && a->params && !(flags & RM_ALLOC_SERIALIZED) &&
	    (!a->params_size || a->params_size >= sizeof(struct rm_group_params)))
		engine = ((const struct rm_group_params *)(uintptr_t)a->params)->engine;
	if (rm_note_alloc(fd, a->client, a->parent, a->object, a->class, engine)) {
		nvs_debugf("rm: compute group %#x of client %#x", a->object, a->client);
		rm_slice_new_group();
	}
}

static void note_request(int fd, uint32_t request, const void *arg, uint64_t serial)
{
	const struct rm_alloc_rights *r = arg;
	const struct rm_alloc *a = arg;
	const struct rm_free *f = arg;

	switch (request) {
	case RM_ALLOC:
		note_alloc(fd, a, a->status, 0);
		break;
	case RM_ALLOC_RIGHTS: /* begins with the same fields, up to the parameters */
		note_alloc(fd, &(struct rm_alloc){ r->client, r->parent, r->object, r->class, r->params,
						   r->params_size, 0 }, r->status, r->flags);
		break;
	case RM_FREE:
		if (!f->status)
			rm_note_free(f->client, f->object, serial);
		break;
	case RM_VERSION:
		rm_note_version(((const struct rm_version *)arg)->text);
		break;
	}
}

/* The argument may be wrong: the kernel reads it. Where it may not (seccomp), all channels go on. */
static void before_free(const void *arg)
{
	struct rm_free f;
	struct iovec to = { &f, sizeof(f) }, from = { (void *)(uintptr_t)arg, sizeof(f) };
	int saved = errno;

	if (syscall(SYS_process_vm_readv, getpid(), &to, 1ul, &from, 1ul, 0ul) == (long)sizeof(f))
		rm_put_on_below(f.client, f.object);
	else
		rm_put_all_on();
	errno = saved;
}

static int rm_request(int fd, unsigned long request, void *arg)
{
	uint64_t serial = rm_serial();
	uint32_t number = (uint32_t)request; /* all that the kernel looks at */
	int rc, saved;

	if (number == RM_FREE && rm_any_off())
		before_free(arg);
	rc = rm_next(fd, request, arg);
	saved = errno;
	if (rc == 0 && arg)
		note_request(fd, number, arg, serial);
	errno = saved;
	return rc;
}

NVS_EXPORT int ioctl(int fd, unsigned long request, ...)
{
	va_list list;
	void *arg;

	va_start(list, request);
	arg = va_arg(list, void *);
	va_end(list);
	if (nvs_unlikely(RM_IS_REQUEST(request)))
		return rm_request(fd, request, arg);
	return rm_next(fd, request, arg);
}
