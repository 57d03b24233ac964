// SPDX-License-Identifier: Apache-2.0
/* work.h: the work of the Go programs, by the driver's functions that they found. */
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

struct driver {
	int (*init)(unsigned);
	int (*device)(int *, int);
	int (*retain)(void **, int);
	int (*current)(void *);
	int (*load)(void **, const void *);
	int (*function)(void **, void *, const char *);
	int (*launch)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
		      void *, void **, void **);
	int (*synchronize)(void);
};

static int work(const struct driver *d, int launches)
{
	static const char ptx[] = ".version 6.0\n.visible .entry nvshare_spin() { ret; }\n";
	uint64_t ns = 200000, record = 0;
	void *params[] = { &ns, &record }, *ctx, *module, *kernel;
	int device, rc;

	if ((rc = d->init(0)) || (rc = d->device(&device, 0)) || (rc = d->retain(&ctx, device)) ||
	    (rc = d->current(ctx)) || (rc = d->load(&module, ptx)) ||
	    (rc = d->function(&kernel, module, "nvshare_spin")))
		return rc;
	for (int i = 0; i < launches; i++)
		if ((rc = d->launch(kernel, 1, 1, 1, 1, 1, 1, 0, NULL, params, NULL)))
			return rc;
	return d->synchronize();
}
