// SPDX-License-Identifier: Apache-2.0
/*
 * module.c: wrappers that load code, whose __device__ variables take memory of the GPU. Nobody tells
 * how much, so the image is read: sections .nv.global of a cubin (ELF), declarations .global of PTX,
 * and the largest cubin of a fat binary that is not compressed. A library counts when it is loaded,
 * on the current GPU. Compressed code, and what the driver links, is not known.
 */
#include <elf.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "descriptor.h"
#include "wrap.h"

#define EM_CUDA_CODE 190
#define FAT_WRAPPER  0x466243b1u
#define FAT_BINARY   0xba55ed50u
#define FAT_ELF      2

struct fat_wrapper {
	uint32_t magic, version;
	const void *data;
};

struct fat_header {
	uint32_t magic;
	uint16_t version, header_bytes;
	uint64_t bytes; /* of all entries */
};

/* The payload follows. */
struct fat_entry {
	uint16_t kind, version;
	uint32_t header_bytes;
	uint64_t bytes;
};

/* ---- how much an image declares ---- */

static bool is_elf(const void *image)
{
	const Elf64_Ehdr *e = image;

	return memcmp(e->e_ident, ELFMAG, SELFMAG) == 0 && e->e_ident[EI_CLASS] == ELFCLASS64 &&
	       e->e_machine == EM_CUDA_CODE;
}

static uint64_t in_elf(const void *image)
{
	const char *base = image, *names;
	const Elf64_Ehdr *e = image;
	const Elf64_Shdr *s = (const void *)(base + e->e_shoff);
	uint64_t bytes = 0;

	if (!e->e_shoff || e->e_shentsize != sizeof(*s) || e->e_shstrndx >= e->e_shnum)
		return 0;
	names = base + s[e->e_shstrndx].sh_offset;
	for (unsigned i = 0; i < e->e_shnum; i++)
		if (s[i].sh_flags & SHF_ALLOC && strncmp(names + s[i].sh_name, ".nv.global", 10) == 0 &&
		    __builtin_add_overflow(bytes, s[i].sh_size, &bytes))
			return UINT64_MAX;
	return bytes;
}

static uint64_t in_fat(const struct fat_header *h)
{
	const char *at = (const char *)h + h->header_bytes, *end = at + h->bytes;
	uint64_t most = 0, bytes;

	while (at + sizeof(struct fat_entry) <= end) {
		const struct fat_entry *f = (const void *)at;

		if (f->header_bytes < sizeof(*f) || f->bytes > (uint64_t)(end - at))
			break;
		if (f->kind == FAT_ELF && f->bytes > sizeof(Elf64_Ehdr) && is_elf(at + f->header_bytes)) {
			bytes = in_elf(at + f->header_bytes);
			most = bytes > most ? bytes : most;
		}
		at += f->header_bytes + f->bytes;
	}
	return most;
}

static bool is_space(char c)
{
	return c == ' ' || (c >= '\t' && c <= '\r');
}

/* strtoull() has another name from glibc 2.38 on. */
static uint64_t number(const char **p)
{
	uint64_t n = 0;

	for (; **p >= '0' && **p <= '9'; ++*p)
		if (__builtin_mul_overflow(n, 10, &n) || __builtin_add_overflow(n, (uint64_t)(**p - '0'), &n))
			n = UINT64_MAX;
	return n;
}

/* Of a declaration, from behind .global to its end: .align 8 .v2 .f32 name[N][M]. */
static uint64_t of_declaration(const char *p)
{
	uint64_t bytes = 0, vector = 1, n;
	bool is_vector;

	for (p += strspn(p, " \t"); *p == '.'; p += strspn(p, " \t")) {
		if (strncmp(p, ".align", 6) == 0) {
			p += 6 + strspn(p + 6, " \t");
			(void)number(&p);
			continue;
		}
		is_vector = *++p == 'v';
		p += strcspn(p, "0123456789 \t\n");
		n = number(&p); /* bits of a type, or a vector's length */
		if (is_vector && n)
			vector = n;
		else if (n >= 8)
			bytes = n / 8;
		p += strcspn(p, " \t\n");
	}
	bytes = nvs_times(bytes, vector);
	for (p += strcspn(p, " \t[;=,"); *p == '[' && bytes; p += *p == ']') {
		p++;
		bytes = nvs_times(bytes, number(&p));
	}
	return bytes;
}

static uint64_t in_ptx(const char *text)
{
	uint64_t bytes = 0;

	for (const char *p = text; (p = strstr(p, ".global")); p++) {
		const char *before = p;

		while (before > text && is_space(before[-1]))
			before--;
		if ((before == p && p > text) || (p[7] != ' ' && p[7] != '\t') ||
		    (before - text >= 7 && strncmp(before - 7, ".extern", 7) == 0))
			continue; /* ld.global and the like; another module's */
		if (__builtin_add_overflow(bytes, of_declaration(p + 7), &bytes))
			return UINT64_MAX;
	}
	return bytes;
}

static uint64_t in_image(const void *image)
{
	const struct fat_wrapper *w = image;
	const unsigned char *first = image;

	if (*first == 0x7f)
		return is_elf(image) ? in_elf(image) : 0;
	if (*first == (FAT_WRAPPER & 0xff) && w->magic == FAT_WRAPPER && w->data)
		image = w->data;
	if (*(const unsigned char *)image == (FAT_BINARY & 0xff))
		return *(const uint32_t *)image == FAT_BINARY ? in_fat(image) : 0;
	return *first < 0x7f && (*first >= ' ' || is_space((char)*first)) ? in_ptx(image) : 0; /* text */
}

/* The driver says what is wrong with a file. */
static uint64_t in_file(const char *name)
{
	int fd = (int)syscall(SYS_openat, AT_FDCWD, name, O_RDONLY | O_CLOEXEC);
	uint64_t bytes = 0;
	struct stat st;
	char *p;

	if (fd < 0)
		return 0;
	/* One byte more is mapped, and zero: PTX ends there. */
	if (nvs_descriptor_stat(fd, &st) && st.st_size > (off_t)sizeof(Elf64_Ehdr)) {
		p = mmap(NULL, (size_t)st.st_size + 1, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
		if (p != MAP_FAILED) {
			if (syscall(SYS_read, fd, p, (size_t)st.st_size) == st.st_size)
				bytes = in_image(p);
			munmap(p, (size_t)st.st_size + 1);
		}
	}
	close(fd);
	return bytes;
}

/* ---- loading ---- */

#define LOAD(name, P, A, out, bytes_of) \
	WRAPPER(name, P) \
	{ \
		return ALLOCATING(nvs_counting() && out ? bytes_of : 0, NVS_MEMORY_CODE, out, 0, CALL(name, NVS_SPREAD A)); \
	}
LOAD(cuModuleLoad, (void **module, const char *file), (module, file), module, (file ? in_file(file) : 0))
LOAD(cuModuleLoadData, (void **module, const void *image), (module, image), module, (image ? in_image(image) : 0))
LOAD(cuModuleLoadDataEx, (void **module, const void *image, uint n, int *options, void **values),
     (module, image, n, options, values), module, (image ? in_image(image) : 0))
LOAD(cuModuleLoadFatBinary, (void **module, const void *image), (module, image), module, (image ? in_image(image) : 0))
LOAD(cuLibraryLoadData, (void **library, const void *code, int *jit, void **jit_values, uint jits, int *options,
			 void **values, uint n), (library, code, jit, jit_values, jits, options, values, n),
     library, (code ? in_image(code) : 0))
LOAD(cuLibraryLoadFromFile, (void **library, const char *file, int *jit, void **jit_values, uint jits,
			     int *options, void **values, uint n),
     (library, file, jit, jit_values, jits, options, values, n), library, (file ? in_file(file) : 0))

FREE(cuModuleUnload, NVS_MEMORY_CODE, (void *module), (module), module)
FREE(cuLibraryUnload, NVS_MEMORY_CODE, (void *library), (library), library)
