// SPDX-License-Identifier: Apache-2.0
/*
 * resolve.c: find the real driver and libnvidia-ml, and answer who looks functions of them up. No lock
 * is held over a call into the dynamic linker, which has its own. Threads that resolve at the same time
 * store the same values.
 */
#include <dlfcn.h>
#include <errno.h>
#include <string.h>
#include <sys/auxv.h>

#include "glibc.h"
#include "hook.h"
#include "libc.h"
#include "rm.h"

_Atomic(void *) nvs_real_table[NVS_F_COUNT], nvs_ungated_table[NVS_CUDA_COUNT - NVS_WRAPPED_COUNT];
struct nvs_nvml nvs_nvml;

const char *const nvs_names[NVS_F_COUNT] = {
#define G(name, P, A, key) [NVS_F_##name] = #name,
	NVS_GATED_TABLE(G)
#undef G
#define H(name) [NVS_F_##name] = #name,
	NVS_OTHER_TABLE(H)
	NVS_UNGATED_TABLE(H)
#undef H
};

/* The libraries whose functions are interposed. */
static struct library {
	const char *soname;
	const char *stem;   /* of the file's name, whatever version follows */
	const unsigned first, end; /* its functions */
	unsigned anchor;    /* one that each version has */
	atomic_bool resolved;
} cuda = { "libcuda.so.1", "libcuda.so", 0, NVS_CUDA_COUNT, NVS_F_cuInit, false },
  nvml = { "libnvidia-ml.so.1", "libnvidia-ml.so", NVS_CUDA_COUNT, NVS_F_COUNT,
	   NVS_F_nvmlDeviceGetMemoryInfo, false };

static struct library *library_of(unsigned f)
{
	return f < NVS_CUDA_COUNT ? &cuda : &nvml;
}

/*
 * Open-addressing map from a real export to one more than its function. Without a lock, which a fork
 * could leave locked: all threads put the same in, in the same order.
 */
#define MAP_SIZE 4096u
_Static_assert(NVS_F_COUNT * 4 <= MAP_SIZE, "map stays sparse");
static _Atomic unsigned short map[MAP_SIZE];

static unsigned hash(const void *p)
{
	return (unsigned)(((uintptr_t)p * 0x9e3779b97f4a7c15ull) >> 40) % MAP_SIZE;
}

/* The place of a real export in the map; 0 is there if it is not in it. */
static _Atomic unsigned short *map_find(const void *p)
{
	for (unsigned i = hash(p);; i = (i + 1) % MAP_SIZE) {
		unsigned short f = atomic_load(&map[i]);

		if (!f || atomic_load(&nvs_real_table[f - 1]) == p)
			return &map[i];
	}
}

static void map_fill(const struct library *l)
{
	for (unsigned short f = (unsigned short)l->first; f < l->end; f++) {
		void *p = atomic_load(&nvs_real_table[f]);

		/* Of two names of one function the first stays. */
		while (p && !atomic_load(map_find(p))) {
			unsigned short none = 0;

			atomic_compare_exchange_strong(map_find(p), &none, (unsigned short)(f + 1));
		}
	}
}

void *nvs_substitute(void *p)
{
	unsigned short f;

	if (!p)
		return p;
	f = atomic_load(map_find(p)); /* nothing is in it while nothing is resolved */
	return f ? nvs_wrappers[f - 1] : p;
}

bool nvs_is_wrapper(const void *p)
{
	for (unsigned f = 0; f < NVS_F_COUNT; f++)
		if (nvs_wrappers[f] == p)
			return true;
	return false;
}

static void *open_library(const struct library *l, void *hint, bool load)
{
	void *handle = NULL;
	Dl_info info;

	if (!dlopen)
		return NULL; /* nor has the program anything to open a driver with */
	handle = dlopen(l->soname, RTLD_LAZY | RTLD_NOLOAD);

	if (!handle && hint && dladdr(hint, &info) && info.dli_fname) {
		const char *base = strrchr(info.dli_fname, '/');

		base = base ? base + 1 : info.dli_fname;
		if (strncmp(base, l->stem, strlen(l->stem)) == 0)
			handle = dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
	}
	if (!handle && load)
		handle = dlopen(l->soname, RTLD_LAZY);
	return handle;
}

static void resolve_driver(void *handle)
{
	void *p;

#define D(member, export, params) \
	if ((p = nvs_next_dlsym(handle, "cu" #export)) != NULL) \
		__atomic_store_n((void **)&nvs_driver_functions.member, p, __ATOMIC_RELAXED);
	NVS_DRIVER_TABLE(D)
#undef D
#define D(member, export, params) \
	if ((p = nvs_next_dlsym(handle, "cu" #export)) != NULL) \
		__atomic_store_n((void **)&nvs_memory_driver_functions.member, p, __ATOMIC_RELAXED);
	NVS_MEMORY_DRIVER_TABLE(D)
#undef D
}

nvs_rm_ioctl *nvs_rm_find_next(void)
{
	return (nvs_rm_ioctl *)nvs_next_dlsym(RTLD_NEXT, "ioctl");
}

/* Early: the first ioctl of the program may be in a signal handler, or in a child of fork. */
__attribute__((constructor)) static void find_next_ioctl(void)
{
	nvs_rm_set_next(nvs_rm_find_next());
}

/* A simulated driver has an ioctl of its own. */
static void resolve_ioctl(void *handle)
{
	void *own = nvs_next_dlsym(handle, "ioctl");
	Dl_info driver, it;

	if (own && dladdr(own, &it) && dladdr(atomic_load(&nvs_real_table[cuda.anchor]), &driver) &&
	    it.dli_fbase == driver.dli_fbase)
		nvs_rm_set_next((nvs_rm_ioctl *)own);
}

/*
 * Finds a library in this process and fills the tables, once. hint: an address that may lie in
 * it, or NULL. load: it is loaded if it is not there yet. False: it is not there.
 */
static bool resolve(struct library *l, void *hint, bool load)
{
	int saved = errno;
	void *handle;

	if (atomic_load(&l->resolved))
		return true;
	/* The handle is kept: the pointers must stay valid. */
	handle = open_library(l, hint, load);
	if (handle) {
		for (unsigned f = l->first; f < l->end; f++) {
			void *p = nvs_next_dlsym(handle, nvs_names[f]);

			atomic_store(&nvs_real_table[f], p);
			if (f >= NVS_WRAPPED_COUNT && f < NVS_CUDA_COUNT)
				atomic_store(&nvs_ungated_table[f - NVS_WRAPPED_COUNT], p);
		}
		if (l == &cuda) {
			resolve_ioctl(handle);
			resolve_driver(handle);
		} else {
			__atomic_store_n((void **)&nvs_nvml.device_uuid,
					 nvs_next_dlsym(handle, "nvmlDeviceGetUUID"),
					 __ATOMIC_RELAXED);
		}
		map_fill(l);
		atomic_store(&l->resolved, true);
	}
	/* The application's next dlerror() is not about our look-ups. */
	if (dlerror)
		dlerror();
	errno = saved;
	return handle != NULL;
}

void *nvs_resolve_one(enum nvs_function f)
{
	struct library *l = library_of(f);
	void *p;

	if (!atomic_load(&l->resolved)) {
		void *hint = nvs_next_dlsym(RTLD_NEXT, nvs_names[f]);

		resolve(l, hint, l == &cuda);
	}
	p = atomic_load(&nvs_real_table[f]);
	return p || l == &nvml ? p : (void *)nvs_driver_lacks;
}

static int function_of(const char *name)
{
	const struct library *l;

	if (name && name[0] == 'c' && name[1] == 'u' && name[2] >= 'A' && name[2] <= 'Z')
		l = &cuda;
	else if (name && nvs_begins(name, "nvmlDevice"))
		l = &nvml;
	else
		return -1;
	for (unsigned f = l->first; f < l->end; f++)
		if (strcmp(nvs_names[f], name) == 0)
			return (int)f;
	return -1;
}

static bool same_object(const void *a, const void *b)
{
	Dl_info x, y;

	return dladdr(a, &x) && dladdr(b, &y) && x.dli_fbase == y.dli_fbase;
}

/* Whether the library that calls would find a function in what it is linked to. */
static bool linked_to(const void *caller, int f)
{
	void *handle, *found;
	Dl_info info;

	if (!dladdr(caller, &info) || !(handle = dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD)))
		return false;
	found = nvs_next_dlsym(handle, nvs_names[f]);
	dlclose(handle);
	return found && found != nvs_wrappers[f];
}

/*
 * The answer to a look-up of an interposed name, given what the linker found. If only the shim has
 * it, it is looked for behind the shim, and among the libraries that the caller is linked to.
 */
static void *answer(int f, void *handle, void *found, void *caller)
{
	void *self = nvs_wrappers[f];

	if (found == self || handle == RTLD_NEXT) {
		found = nvs_next_dlsym(RTLD_NEXT, nvs_names[f]);
		if (!found && atomic_load(&nvs_real_table[f])) {
			if (linked_to(caller, f))
				return self;
			found = nvs_next_dlsym(RTLD_NEXT, nvs_names[f]); /* for dlerror() */
		}
	}
	if (!found)
		return NULL;
	if (resolve(library_of((unsigned)f), found, false) && handle == RTLD_NEXT &&
	    same_object(found, caller) && atomic_load(&nvs_real_table[f]))
		return self; /* an interposer after us asks for what comes after it */
	return nvs_substitute(found);
}

static bool called_by(const struct library *l, const void *caller)
{
	return atomic_load(&l->resolved) &&
	       same_object(atomic_load(&nvs_real_table[l->anchor]), caller);
}

struct route {
	void *result;
	uintptr_t answered; /* 0: forward to the next dlsym */
};
static const struct route forward;

static struct route answered(void *result)
{
	return (struct route){ result, 1 };
}

/* Called by the trampolines in tail.S; caller is the return address. */
__attribute__((visibility("hidden"))) struct route nvs_dlsym_route(void *, const char *, const char *, void *);
__attribute__((visibility("hidden"))) struct route nvs_dlvsym_route(void *, const char *, const char *, void *);

struct route nvs_dlsym_route(void *handle, const char *name, const char *none, void *caller)
{
	int f;

	(void)none;
	if (!nvs_find_next())
		return answered(NULL);
	f = function_of(name);
	if (f < 0)
		return forward;
	/* The libraries themselves get what they ask for. */
	resolve(library_of((unsigned)f), NULL, false);
	if (called_by(&cuda, caller) || called_by(&nvml, caller))
		return forward;
	return answered(answer(f, handle, handle == RTLD_NEXT ? NULL : nvs_next_dlsym(handle, name), caller));
}

/* Whether what calls is the program, or a library that comes before the shim. */
static bool comes_before(const void *caller)
{
	const struct link_map *m = nvs_loaded();
	Dl_info info;

	if (!m || !dladdr(caller, &info))
		return false;
	if (same_object(caller, (const void *)getauxval(AT_PHDR)))
		return true;
	for (; m && m->l_ld != _DYNAMIC; m = m->l_next)
		if (m->l_addr == (ElfW(Addr))info.dli_fbase)
			return true;
	return false;
}

/*
 * A library that interposes dlsym before us asks for the next one by a version, and ours has
 * none: the linker would pass us over.
 */
static void *next_in_line(void *handle, const char *name, const void *caller)
{
	bool symbol = name && nvs_same_name(name, "dlsym");

	if (handle != RTLD_NEXT || !name || (!symbol && !nvs_same_name(name, "dlvsym")) || !comes_before(caller))
		return NULL;
	return symbol ? (void *)dlsym : (void *)dlvsym;
}

struct route nvs_dlvsym_route(void *handle, const char *name, const char *version, void *caller)
{
	dlvsym_fn *next = nvs_find_next() ? atomic_load(&nvs_next_dlvsym_pointer) : NULL;
	void *found = next ? next_in_line(handle, name, caller) : NULL;
	int f;

	if (!next || found)
		return answered(found);
	f = function_of(name);
	if (f < 0)
		return forward;
	if (handle != RTLD_NEXT && !(found = next(handle, name, version)))
		return answered(NULL);
	return answered(answer(f, handle, found, caller));
}
