// SPDX-License-Identifier: Apache-2.0
#include "glibc.h"

struct nvs_late nvs_late = {
#define F(name) .name = pthread_##name,
	NVS_LATE(F)
#undef F
};

bool nvs_late_find(void)
{
	struct nvs_late found;
	bool all = true;
	void *handle;

	if (nvs_late.create)
		return true;
	handle = dlopen ? dlopen("libpthread.so.0", RTLD_LAZY | RTLD_NOLOAD) : NULL;
	if (!handle)
		return false;
#define F(name) \
	*(void **)&found.name = dlsym(handle, "pthread_" #name); \
	all = all && found.name;
	NVS_LATE(F)
#undef F
	if (all)
		nvs_late = found;
	return all;
}
