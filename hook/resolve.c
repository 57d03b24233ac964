// SPDX-License-Identifier: Apache-2.0
/*
 * resolve.c: find the real dlsym and the real driver.
 *
 * No lock is held over a call into the dynamic linker: a constructor that runs
 * under the linker's own lock may come here too. Threads that resolve at the
 * same time store the same values.
 */
#include <ctype.h>
#include <dlfcn.h>
#include <elf.h>
#include <errno.h>
#include <link.h>
#include <pthread.h>
#include <string.h>

#include "glibc.h"
#include "hook.h"

_Atomic(void *) nvs_real_table[NVS_F_COUNT];
struct nvs_driver nvs_driver;

const char *const nvs_names[NVS_F_COUNT] = {
#define G(name, P, A, key) [NVS_F_##name] = #name,
	NVS_GATED_TABLE(G)
#undef G
#define H(name) [NVS_F_##name] = #name,
	NVS_OTHER_TABLE(H)
#undef H
};

static atomic_bool resolved;

/* Open-addressing map from real export to function; filled once. */
#define MAP_SIZE 2048u
_Static_assert(NVS_F_COUNT * 4 <= MAP_SIZE, "map stays sparse");
static struct {
	void *key;
	unsigned short function;
} map[MAP_SIZE];
static pthread_mutex_t map_lock = PTHREAD_MUTEX_INITIALIZER;

static unsigned hash(const void *p)
{
	return (unsigned)(((uintptr_t)p * 0x9e3779b97f4a7c15ull) >> 40) % MAP_SIZE;
}

static void map_fill(void)
{
	pthread_mutex_lock(&map_lock);
	if (!atomic_load(&resolved)) {
		for (unsigned f = 0; f < NVS_F_COUNT; f++) {
			void *p = atomic_load(&nvs_real_table[f]);
			unsigned i = hash(p);

			if (!p)
				continue;
			while (map[i].key && map[i].key != p)
				i = (i + 1) % MAP_SIZE;
			if (map[i].key)
				continue; /* two names of one function */
			map[i].key = p;
			map[i].function = (unsigned short)f;
		}
		atomic_store(&resolved, true);
	}
	pthread_mutex_unlock(&map_lock);
}

void *nvs_substitute(void *p)
{
	if (!p || !atomic_load_explicit(&resolved, memory_order_acquire))
		return p;
	for (unsigned i = hash(p); map[i].key; i = (i + 1) % MAP_SIZE)
		if (map[i].key == p)
			return nvs_wrappers[map[i].function];
	return p;
}

bool nvs_is_wrapper(const void *p)
{
	for (unsigned f = 0; f < NVS_F_COUNT; f++)
		if (nvs_wrappers[f] == p)
			return true;
	return false;
}

static void *open_driver(void *hint, bool load)
{
	void *handle = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
	Dl_info info;

	if (!handle && hint && dladdr(hint, &info) && info.dli_fname) {
		const char *base = strrchr(info.dli_fname, '/');

		base = base ? base + 1 : info.dli_fname;
		if (strncmp(base, "libcuda.so", 10) == 0)
			handle = dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
	}
	if (!handle && load)
		handle = dlopen("libcuda.so.1", RTLD_LAZY);
	return handle;
}

bool nvs_resolve(void *hint, bool load)
{
	int saved = errno;
	void *handle;

	if (atomic_load(&resolved))
		return true;
	/* The handle is kept: the pointers must stay valid. */
	handle = open_driver(hint, load);
	if (handle) {
		struct nvs_driver d;

		for (unsigned f = 0; f < NVS_F_COUNT; f++)
			atomic_store(&nvs_real_table[f], nvs_next_dlsym(handle, nvs_names[f]));
#define D(member, name, params) *(void **)&d.member = nvs_next_dlsym(handle, name);
		NVS_DRIVER_TABLE(D)
#undef D
		pthread_mutex_lock(&map_lock);
		if (!atomic_load(&resolved))
			nvs_driver = d;
		pthread_mutex_unlock(&map_lock);
		map_fill();
	}
	/* The application's next dlerror() is not about our look-ups. */
	dlerror();
	errno = saved;
	return handle != NULL;
}

void *nvs_resolve_one(enum nvs_function f)
{
	if (!atomic_load(&resolved)) {
		void *hint = nvs_next_dlsym(RTLD_NEXT, nvs_names[f]);

		nvs_resolve(hint, true);
	}
	return atomic_load(&nvs_real_table[f]);
}

/*
 * The real dlsym. Both dlsym and dlvsym are interposed, also for versioned
 * look-ups, so that the linker can't be asked: glibc's dlvsym is read from its
 * symbol table, and asked for the dlsym next in line.
 */
typedef void *dlsym_fn(void *, const char *);
typedef void *dlvsym_fn(void *, const char *, const char *);

/* Read by the trampolines. */
__attribute__((visibility("hidden"))) _Atomic(dlsym_fn *) nvs_next_dlsym_pointer;
__attribute__((visibility("hidden"))) _Atomic(dlvsym_fn *) nvs_next_dlvsym_pointer;

struct elf_tables {
	const ElfW(Sym) *symbols;
	const char *strings;
	const uint32_t *gnu_hash;
};

static uint32_t gnu_hash(const char *s)
{
	uint32_t h = 5381;

	for (; *s; s++)
		h = h * 33 + (unsigned char)*s;
	return h;
}

static const ElfW(Sym) *elf_find(const struct elf_tables *t, const char *name)
{
	uint32_t buckets = t->gnu_hash[0], first = t->gnu_hash[1], bloom = t->gnu_hash[2];
	const uint32_t *bucket = t->gnu_hash + 4 + bloom * (sizeof(ElfW(Addr)) / 4);
	const uint32_t *chain = bucket + buckets;
	uint32_t h = gnu_hash(name), i;

	if (!buckets)
		return NULL;
	i = bucket[h % buckets];
	if (i < first)
		return NULL;
	for (;; i++) {
		uint32_t c = chain[i - first];
		const ElfW(Sym) *s = &t->symbols[i];

		if ((c | 1) == (h | 1) && s->st_shndx != SHN_UNDEF &&
		    strcmp(t->strings + s->st_name, name) == 0)
			return s;
		if (c & 1)
			return NULL;
	}
}

static int find_dlvsym(struct dl_phdr_info *info, size_t size, void *arg)
{
	struct elf_tables t = { 0 };
	const ElfW(Dyn) *dyn = NULL;
	const ElfW(Sym) *sym;
	const char *base = info->dlpi_name ? strrchr(info->dlpi_name, '/') : NULL;

	(void)size;
	base = base ? base + 1 : info->dlpi_name;
	if (!base || (strncmp(base, "libc.so", 7) != 0 && strncmp(base, "libdl.so", 8) != 0))
		return 0;
	for (int i = 0; i < info->dlpi_phnum; i++)
		if (info->dlpi_phdr[i].p_type == PT_DYNAMIC)
			dyn = (const void *)(info->dlpi_addr + info->dlpi_phdr[i].p_vaddr);
	for (; dyn && dyn->d_tag != DT_NULL; dyn++) {
		ElfW(Addr) p = dyn->d_un.d_ptr;

		if (p < info->dlpi_addr)
			p += info->dlpi_addr; /* not relocated in place */
		if (dyn->d_tag == DT_SYMTAB)
			t.symbols = (const void *)p;
		else if (dyn->d_tag == DT_STRTAB)
			t.strings = (const void *)p;
		else if (dyn->d_tag == DT_GNU_HASH)
			t.gnu_hash = (const void *)p;
	}
	if (!t.symbols || !t.strings || !t.gnu_hash)
		return 0;
	sym = elf_find(&t, "dlvsym");
	if (!sym)
		return 0;
	*(void **)arg = (void *)(info->dlpi_addr + sym->st_value);
	return 1;
}

/* Returns false only on a libc that is not glibc. */
static bool find_next(void)
{
	static const char *const versions[] = { "GLIBC_2.34", "GLIBC_2.17", "GLIBC_2.2.5" };
	void *p = NULL, *sym = NULL;

	if (atomic_load_explicit(&nvs_next_dlsym_pointer, memory_order_acquire))
		return true;
	dl_iterate_phdr(find_dlvsym, &p);
	if (!p)
		return false;
	for (unsigned i = 0; !sym && i < sizeof(versions) / sizeof(versions[0]); i++)
		sym = ((dlvsym_fn *)p)(RTLD_NEXT, "dlsym", versions[i]);
	dlerror();
	if (!sym)
		return false;
	atomic_store(&nvs_next_dlvsym_pointer, (dlvsym_fn *)p);
	atomic_store(&nvs_next_dlsym_pointer, (dlsym_fn *)sym);
	return true;
}

void *nvs_next_dlsym(void *handle, const char *name)
{
	return find_next() ? atomic_load(&nvs_next_dlsym_pointer)(handle, name) : NULL;
}

void *nvs_next_dlvsym(void *handle, const char *name, const char *version)
{
	return find_next() ? atomic_load(&nvs_next_dlvsym_pointer)(handle, name, version) : NULL;
}

static int function_of(const char *name)
{
	if (!name || name[0] != 'c' || name[1] != 'u' || !isupper((unsigned char)name[2]))
		return -1;
	for (unsigned f = 0; f < NVS_F_COUNT; f++)
		if (strcmp(nvs_names[f], name) == 0)
			return (int)f;
	return -1;
}

static bool same_object(const void *a, const void *b)
{
	Dl_info x, y;

	return dladdr(a, &x) && dladdr(b, &y) && x.dli_fbase == y.dli_fbase;
}

/*
 * The answer to a look-up of an interposed name, given what the linker found.
 * A name that only the shim exports is not there: ask who comes after it.
 */
static void *answer(int f, void *handle, void *found, void *caller)
{
	void *self = nvs_wrappers[f];

	if (found == self || handle == RTLD_NEXT)
		found = nvs_next_dlsym(RTLD_NEXT, nvs_names[f]);
	if (!found)
		return NULL;
	if (nvs_resolve(found, false) && handle == RTLD_NEXT && same_object(found, caller) &&
	    atomic_load(&nvs_real_table[f]))
		return self; /* an interposer after us asks for what comes after it */
	return nvs_substitute(found);
}

struct route {
	void *result;
	uintptr_t answered; /* 0: forward to the next dlsym */
};

/* Called by the trampoline in tail.S; caller is the return address. */
__attribute__((visibility("hidden"))) struct route nvs_dlsym_route(void *handle, const char *name,
								   void *caller);
struct route nvs_dlsym_route(void *handle, const char *name, void *caller)
{
	struct route r = { NULL, 0 };
	int f;

	if (!find_next()) {
		r.answered = 1;
		return r;
	}
	f = function_of(name);
	if (f < 0)
		return r;
	/* The driver itself gets what it asks for. */
	if (nvs_resolve(NULL, false) &&
	    same_object(atomic_load(&nvs_real_table[NVS_F_cuInit]), caller))
		return r;
	r.answered = 1;
	if (handle == RTLD_NEXT)
		r.result = answer(f, handle, NULL, caller);
	else
		r.result = answer(f, handle, nvs_next_dlsym(handle, name), caller);
	return r;
}

__attribute__((visibility("hidden"))) struct route
nvs_dlvsym_route(void *handle, const char *name, const char *version, void *caller);
struct route nvs_dlvsym_route(void *handle, const char *name, const char *version, void *caller)
{
	struct route r = { NULL, 0 };
	int f;

	if (!find_next()) {
		r.answered = 1;
		return r;
	}
	f = function_of(name);
	if (f < 0)
		return r;
	r.answered = 1;
	if (handle != RTLD_NEXT) {
		r.result = nvs_next_dlvsym(handle, name, version);
		if (!r.result)
			return r;
	}
	r.result = answer(f, handle, r.result, caller);
	return r;
}
