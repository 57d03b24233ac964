// SPDX-License-Identifier: Apache-2.0
/*
 * libc.c: the real dlsym. Both dlsym and dlvsym are interposed, so the linker can't be asked: glibc's
 * dlvsym is read from its symbol table, and asked for the dlsym next in line. musl's own dlsym is read
 * in the same way, so that a program with us preloaded runs on there.
 */
#include "libc.h"

#include <dlfcn.h>
#include <elf.h>
#include <sys/auxv.h>

#include "glibc.h"
#include "hook.h"

__attribute__((visibility("hidden"))) _Atomic(dlsym_fn *) nvs_next_dlsym_pointer;
__attribute__((visibility("hidden"))) _Atomic(dlvsym_fn *) nvs_next_dlvsym_pointer;

struct elf_tables {
	const ElfW(Sym) *symbols;
	const char *strings;
	const uint32_t *gnu_hash;
	const uint32_t *hash;
};

static uint32_t gnu_hash(const char *s)
{
	uint32_t h = 5381;

	for (; *s; s++)
		h = h * 33 + (unsigned char)*s;
	return h;
}

static const char *base_name(const char *path)
{
	const char *base = path;

	for (; *path; path++)
		if (*path == '/')
			base = path + 1;
	return base;
}

static bool elf_is(const struct elf_tables *t, const ElfW(Sym) *s, const char *name)
{
	return s->st_shndx != SHN_UNDEF && nvs_same_name(t->strings + s->st_name, name);
}

static const ElfW(Sym) *elf_find_gnu(const struct elf_tables *t, const char *name)
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

		if ((c | 1) == (h | 1) && elf_is(t, s, name))
			return s;
		if (c & 1)
			return NULL;
	}
}

static const ElfW(Sym) *elf_find(const struct elf_tables *t, const char *name)
{
	if (t->gnu_hash)
		return elf_find_gnu(t, name);
	for (uint32_t i = 0; i < t->hash[1]; i++)
		if (elf_is(t, &t->symbols[i], name))
			return &t->symbols[i];
	return NULL;
}

struct libc {
	void *dlvsym; /* glibc's */
	void *dlsym;  /* musl's */
};

/* Returns whether this object is a C library that has what we look for. */
static bool take_libc(ElfW(Addr) base, const char *path, const ElfW(Dyn) *dyn, struct libc *out)
{
	struct elf_tables t = { 0 };
	const ElfW(Sym) *sym;
	const char *name;
	bool musl;

	if (!path)
		return false;
	name = base_name(path);
	musl = nvs_begins(name, "ld-musl") || nvs_begins(name, "libc.musl");
	if (!musl && !nvs_begins(name, "libc.so") && !nvs_begins(name, "libdl.so"))
		return false;
	for (; dyn && dyn->d_tag != DT_NULL; dyn++) {
		ElfW(Addr) p = dyn->d_un.d_ptr;

		if (p < base)
			p += base; /* not relocated in place */
		if (dyn->d_tag == DT_SYMTAB)
			t.symbols = (const void *)p;
		else if (dyn->d_tag == DT_STRTAB)
			t.strings = (const void *)p;
		else if (dyn->d_tag == DT_GNU_HASH)
			t.gnu_hash = (const void *)p;
		else if (dyn->d_tag == DT_HASH)
			t.hash = (const void *)p;
	}
	if (!t.symbols || !t.strings || (!t.gnu_hash && !t.hash))
		return false;
	sym = elf_find(&t, musl ? "dlsym" : "dlvsym");
	if (!sym)
		return false;
	*(musl ? &out->dlsym : &out->dlvsym) = (void *)(base + sym->st_value);
	return true;
}

const struct link_map *nvs_loaded(void)
{
	const ElfW(Phdr) *headers = (const void *)getauxval(AT_PHDR);
	unsigned long count = headers ? getauxval(AT_PHNUM) : 0;
	const ElfW(Dyn) *dyn = NULL;
	ElfW(Addr) base = 0;

	for (unsigned long i = 0; i < count; i++)
		if (headers[i].p_type == PT_PHDR)
			base = (ElfW(Addr))headers - headers[i].p_vaddr;
	for (unsigned long i = 0; i < count; i++)
		if (headers[i].p_type == PT_DYNAMIC)
			dyn = (const void *)(base + headers[i].p_vaddr);
	for (; dyn && dyn->d_tag != DT_NULL; dyn++)
		if (dyn->d_tag == DT_DEBUG && dyn->d_un.d_ptr)
			return ((const struct r_debug *)dyn->d_un.d_ptr)->r_map;
	return NULL;
}

static int take_object(struct dl_phdr_info *info, size_t size, void *arg)
{
	const ElfW(Dyn) *dyn = NULL;

	(void)size;
	for (int i = 0; i < info->dlpi_phnum; i++)
		if (info->dlpi_phdr[i].p_type == PT_DYNAMIC)
			dyn = (const void *)(info->dlpi_addr + info->dlpi_phdr[i].p_vaddr);
	return take_libc(info->dlpi_addr, info->dlpi_name, dyn, arg);
}

/* A sanitizer's dl_iterate_phdr, too, is not to be called before its time. */
static void find_libc(struct libc *out)
{
	for (const struct link_map *m = nvs_loaded(); m; m = m->l_next)
		if (take_libc(m->l_addr, m->l_name, m->l_ld, out))
			return;
	dl_iterate_phdr(take_object, out);
}

bool nvs_find_next(void)
{
	struct libc libc = { NULL, NULL };

	if (atomic_load_explicit(&nvs_next_dlsym_pointer, memory_order_acquire))
		return true;
	find_libc(&libc);
	/*
	 * The oldest version first, which each glibc has: a look-up that fails allocates, and we may
	 * be inside an allocator that looks up its own.
	 */
	if (libc.dlvsym) {
		dlvsym_fn *find = (dlvsym_fn *)libc.dlvsym;

		libc.dlsym = find(RTLD_NEXT, "dlsym", NVS_GLIBC_BASE);
		if (!libc.dlsym)
			libc.dlsym = find(RTLD_NEXT, "dlsym", "GLIBC_2.34");
	}
	if (!libc.dlsym)
		return false;
	atomic_store(&nvs_next_dlvsym_pointer, (dlvsym_fn *)libc.dlvsym);
	atomic_store(&nvs_next_dlsym_pointer, (dlsym_fn *)libc.dlsym);
	return true;
}

void *nvs_next_dlsym(void *handle, const char *name)
{
	return nvs_find_next() ? atomic_load(&nvs_next_dlsym_pointer)(handle, name) : NULL;
}
