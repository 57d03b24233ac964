// SPDX-License-Identifier: Apache-2.0
/*
 * names-memory: what the driver does with calls that only name memory, while that memory
 * is unmapped and its address still reserved. Such is memory that was swapped out.
 *
 * usage: names-memory [CALL...]   (default: all)
 *
 * For each call, in a process of its own: maps 2 MiB, unmaps them, makes the call with
 * their address, maps memory there again, and uses what the call made. Prints one line:
 *
 *   CALL mapped=RESULT unmapped=RESULT used=RESULT data=right|wrong|-
 *
 * mapped: the call's result while the memory is there, from another process. used: the
 * result of using what the call made (an exec instantiated and launched, the context
 * synchronised), once memory is there again. A RESULT is the CUresult; "signal N": the
 * process died; "absent": the driver has no such function. Needs libcuda.so.1 and no
 * header of CUDA. Run it without the shim.
 */
#include <dlfcn.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#define BYTES  (2ull << 20)
#define WORDS  1024u       /* of it that are written */
#define VALUE  0x5a5a5a5au
#define ABSENT (-1)
#define LIMIT_S 30         /* of one process */

typedef unsigned long long ptr;

struct location { int type, id; };
struct alloc_prop {
	int type, handle_types;
	struct location at;
	void *win32;
	unsigned char flags[8];
};
struct access { struct location at; int flags; };
struct memcpy3d {
	size_t src_at[4];
	unsigned src_type;
	const void *src_host;
	ptr src;
	void *src_array, *src_ctx;
	size_t src_pitch, src_height;
	size_t dst_at[4];
	unsigned dst_type;
	void *dst_host;
	ptr dst;
	void *dst_array, *dst_ctx;
	size_t dst_pitch, dst_height, width, height, depth;
};
struct memset_node { /* the second version ends with the context */
	ptr dst;
	size_t pitch;
	unsigned value, element;
	size_t width, height;
	void *ctx;
};
struct node_params {
	int type, reserved[3];
	union {
		struct { int flags, reserved; void *ctx; struct memcpy3d p; } copy;
		struct memset_node set;
		long long size[29];
	} u;
	long long reserved2;
};
struct mem_op { unsigned type, pad; ptr address; uint64_t value; uint64_t rest[3]; };
struct mem_op_node { void *ctx; unsigned count; struct mem_op *ops; unsigned flags; };
struct kernel_node {
	void *function;
	unsigned grid[3], block[3], shared;
	void **params, **extra;
	void *kernel, *ctx;
};
struct resource {
	int type;
	union {
		struct { ptr p; int format; unsigned channels; size_t bytes; } linear;
		struct { ptr p; int format; unsigned channels; size_t width, height, pitch; } pitch;
		int size[32];
	} u;
	unsigned flags;
};
struct texture { int address[3], filter; unsigned flags, rest[32]; };
struct array_desc { size_t width, height; int format; unsigned channels; };

enum { DEVICE = 1, ON_DEVICE = 2, UNSIGNED_32 = 3, LINEAR = 2, PITCH2D = 3 };

/* ---- the driver ---- */

static void *lib;

static void *find(const char *name)
{
	return dlsym(lib, name);
}

/* Calls a function of the driver; ABSENT if there is none. */
#define CU(name, types, ...) \
	__extension__({ \
		int (*f_) types; \
		*(void **)&f_ = find(name); \
		f_ ? f_(__VA_ARGS__) : ABSENT; \
	})

static void must(int result, const char *what)
{
	if (result == 0)
		return;
	fprintf(stderr, "names-memory: %s: result %d\n", what, result);
	exit(1);
}

static void *ctx, *stream;
static ptr memory, other; /* the memory that goes, and memory that stays */
static void *graph, *exec, *node;
static uint32_t host[WORDS];
static ptr texture;
static void *texref;

static void map(void)
{
	struct alloc_prop prop = { .type = 1, .at = { DEVICE, 0 } };
	struct access a = { { DEVICE, 0 }, 3 };
	unsigned long long handle;

	must(CU("cuMemCreate", (unsigned long long *, size_t, const void *, unsigned long long), &handle, BYTES,
		&prop, 0), "cuMemCreate");
	must(CU("cuMemMap", (ptr, size_t, size_t, unsigned long long, unsigned long long), memory, BYTES, 0,
		handle, 0), "cuMemMap");
	must(CU("cuMemRelease", (unsigned long long), handle), "cuMemRelease");
	must(CU("cuMemSetAccess", (ptr, size_t, const void *, size_t), memory, BYTES, &a, 1), "cuMemSetAccess");
	must(CU("cuMemsetD32_v2", (ptr, unsigned, size_t), memory, 0, BYTES / 4), "cuMemsetD32");
	must(CU("cuCtxSynchronize", (void)), "cuCtxSynchronize");
}

static void open_driver(void)
{
	lib = dlopen("libcuda.so.1", RTLD_NOW);
	if (!lib) {
		fprintf(stderr, "names-memory: libcuda.so.1 cannot be loaded: %s\n", dlerror());
		exit(1);
	}
	must(CU("cuInit", (unsigned), 0), "cuInit");
	must(CU("cuDevicePrimaryCtxRetain", (void **, int), &ctx, 0), "cuDevicePrimaryCtxRetain");
	must(CU("cuCtxSetCurrent", (void *), ctx), "cuCtxSetCurrent");
	must(CU("cuStreamCreate", (void **, unsigned), &stream, 1), "cuStreamCreate");
	must(CU("cuMemAlloc_v2", (ptr *, size_t), &other, BYTES), "cuMemAlloc");
	must(CU("cuMemsetD32_v2", (ptr, unsigned, size_t), other, VALUE, WORDS), "cuMemsetD32");
	must(CU("cuMemAddressReserve", (ptr *, size_t, size_t, ptr, unsigned long long), &memory, BYTES, 0, 0, 0),
	     "cuMemAddressReserve");
	must(CU("cuGraphCreate", (void **, unsigned), &graph, 0), "cuGraphCreate");
	for (unsigned i = 0; i < WORDS; i++)
		host[i] = VALUE;
	map();
}

/* ---- the calls; each names memory, and what it makes writes VALUE there ---- */

static struct memcpy3d copy(ptr to, ptr from)
{
	return (struct memcpy3d){ .src_type = ON_DEVICE, .src = from, .dst_type = ON_DEVICE, .dst = to,
				  .width = WORDS * 4, .height = 1, .depth = 1 };
}

static struct memset_node set(ptr to)
{
	return (struct memset_node){ to, 0, VALUE, 4, WORDS, 1, ctx };
}

static int add_copy(ptr to, ptr from)
{
	struct memcpy3d p = copy(to, from);

	return CU("cuGraphAddMemcpyNode", (void **, void *, const void *, size_t, const void *, void *), &node,
		  graph, NULL, 0, &p, ctx);
}

static int add_set(ptr to)
{
	struct memset_node p = set(to);

	return CU("cuGraphAddMemsetNode", (void **, void *, const void *, size_t, const void *, void *), &node,
		  graph, NULL, 0, &p, ctx);
}

static int copy_node_to(void) { return add_copy(memory, other); }
static int copy_node_from(void) { return add_copy(other, memory); }
static int set_node(void) { return add_set(memory); }

static int copy_node_set(void)
{
	struct memcpy3d p = copy(memory, other);

	must(add_copy(other + BYTES / 2, other), "cuGraphAddMemcpyNode");
	return CU("cuGraphMemcpyNodeSetParams", (void *, const void *), node, &p);
}

static int set_node_set(void)
{
	struct memset_node p = set(memory);

	must(add_set(other + BYTES / 2), "cuGraphAddMemsetNode");
	return CU("cuGraphMemsetNodeSetParams", (void *, const void *), node, &p);
}

static int instantiate(void)
{
	return CU("cuGraphInstantiateWithFlags", (void **, void *, unsigned long long), &exec, graph, 0);
}

static int copy_exec_set(void)
{
	struct memcpy3d p = copy(memory, other);

	must(add_copy(other + BYTES / 2, other), "cuGraphAddMemcpyNode");
	must(instantiate(), "cuGraphInstantiate");
	return CU("cuGraphExecMemcpyNodeSetParams", (void *, void *, const void *, void *), exec, node, &p, ctx);
}

static int set_exec_set(void)
{
	struct memset_node p = set(memory);

	must(add_set(other + BYTES / 2), "cuGraphAddMemsetNode");
	must(instantiate(), "cuGraphInstantiate");
	return CU("cuGraphExecMemsetNodeSetParams", (void *, void *, const void *, void *), exec, node, &p, ctx);
}

static int add_any(const struct node_params *p)
{
	return CU("cuGraphAddNode", (void **, void *, const void *, size_t, const void *), &node, graph, NULL, 0, p);
}

static int any_copy_node(void)
{
	struct node_params p = { .type = 1 };

	p.u.copy.ctx = ctx;
	p.u.copy.p = copy(memory, other);
	return add_any(&p);
}

static int any_set_node(void)
{
	struct node_params p = { .type = 2 };

	p.u.set = set(memory);
	return add_any(&p);
}

static int mem_op_node(void)
{
	struct mem_op op = { .type = 2, .address = memory, .value = VALUE }; /* writes one word */
	struct mem_op_node p = { ctx, 1, &op, 0 };

	return CU("cuGraphAddBatchMemOpNode", (void **, void *, const void *, size_t, const void *), &node, graph,
		  NULL, 0, &p);
}

static const char ptx[] =
	".version 6.0\n.target sm_50\n.address_size 64\n"
	".visible .entry store(.param .u64 p, .param .u32 v)\n"
	"{\n"
	"	.reg .b32 %r<5>;\n"
	"	.reg .b64 %rd<4>;\n"
	"	ld.param.u64 %rd1, [p];\n"
	"	ld.param.u32 %r1, [v];\n"
	"	mov.u32 %r2, %tid.x;\n"
	"	mul.wide.u32 %rd2, %r2, 4;\n"
	"	add.u64 %rd3, %rd1, %rd2;\n"
	"	st.global.u32 [%rd3], %r1;\n"
	"	ret;\n"
	"}\n";

static int kernel_node(void)
{
	uint32_t value = VALUE;
	void *args[] = { &memory, &value }, *module;
	struct kernel_node p = { .grid = { 1, 1, 1 }, .block = { WORDS, 1, 1 }, .params = args };

	must(CU("cuModuleLoadData", (void **, const void *), &module, ptx), "cuModuleLoadData");
	must(CU("cuModuleGetFunction", (void **, void *, const char *), &p.function, module, "store"),
	     "cuModuleGetFunction");
	return CU("cuGraphAddKernelNode_v2", (void **, void *, const void *, size_t, const void *), &node, graph,
		  NULL, 0, &p);
}

/* What a capture makes in place of the empty graph. */
static int captured(int (*submit)(void))
{
	int result, ended;

	must(CU("cuStreamBeginCapture_v2", (void *, int), stream, 2), "cuStreamBeginCapture");
	result = submit();
	ended = CU("cuStreamEndCapture", (void *, void **), stream, &graph);
	return result ? result : ended;
}

static int submit_copy(void)
{
	return CU("cuMemcpyDtoDAsync_v2", (ptr, ptr, size_t, void *), memory, other, WORDS * 4, stream);
}

static int submit_set(void)
{
	return CU("cuMemsetD32Async", (ptr, unsigned, size_t, void *), memory, VALUE, WORDS, stream);
}

static int captured_copy(void) { return captured(submit_copy); }
static int captured_set(void) { return captured(submit_set); }

static bool away; /* unmapped by the call itself, after it was named */

static void unmap(void)
{
	must(CU("cuCtxSynchronize", (void)), "cuCtxSynchronize");
	must(CU("cuMemUnmap", (ptr, size_t), memory, BYTES), "cuMemUnmap");
}

/* Named while it is there, in a graph that is instantiated or updated while it is not. */
static int named_before(int (*add)(void), int (*then)(void), bool unmapped)
{
	if (unmapped)
		map();
	must(add(), "node");
	if (unmapped)
		unmap();
	return then();
}

static int instantiate_copy(void) { return named_before(copy_node_to, instantiate, away); }
static int instantiate_set(void) { return named_before(set_node, instantiate, away); }

static int update_exec(void)
{
	char result[256];

	return CU("cuGraphExecUpdate_v2", (void *, void *, void *), exec, graph, result);
}

/* The exec is of the same kind of node, elsewhere. */
static int update(void)
{
	must(add_copy(other + BYTES / 2, other), "cuGraphAddMemcpyNode");
	must(instantiate(), "cuGraphInstantiate");
	must(CU("cuGraphCreate", (void **, unsigned), &graph, 0), "cuGraphCreate");
	return named_before(copy_node_to, update_exec, away);
}

static int upload(void)
{
	return CU("cuGraphUpload", (void *, void *), exec, stream);
}

static int upload_copy(void)
{
	if (away)
		map();
	must(copy_node_to(), "cuGraphAddMemcpyNode");
	must(instantiate(), "cuGraphInstantiate");
	if (away)
		unmap();
	return upload();
}

static int object_linear(void)
{
	struct resource r = { .type = LINEAR };
	struct texture t = { .flags = 1 };

	r.u.linear.p = memory;
	r.u.linear.format = UNSIGNED_32;
	r.u.linear.channels = 1;
	r.u.linear.bytes = WORDS * 4;
	return CU("cuTexObjectCreate", (ptr *, const void *, const void *, const void *), &texture, &r, &t, NULL);
}

static int object_pitch(void)
{
	struct resource r = { .type = PITCH2D };
	struct texture t = { .flags = 1 };

	r.u.pitch.p = memory;
	r.u.pitch.format = UNSIGNED_32;
	r.u.pitch.channels = 1;
	r.u.pitch.width = 256;
	r.u.pitch.height = 4;
	r.u.pitch.pitch = 1024;
	return CU("cuTexObjectCreate", (ptr *, const void *, const void *, const void *), &texture, &r, &t, NULL);
}

static int reference(void)
{
	int result = CU("cuTexRefCreate", (void **), &texref);

	return result ? result : CU("cuTexRefSetFormat", (void *, int, int), texref, UNSIGNED_32, 1);
}

static int reference_linear(void)
{
	size_t offset;
	int result = reference();

	return result ? result : CU("cuTexRefSetAddress_v2", (size_t *, void *, ptr, size_t), &offset, texref,
				    memory, WORDS * 4);
}

static int reference_2d(void)
{
	struct array_desc d = { 256, 4, UNSIGNED_32, 1 };
	int result = reference();

	return result ? result : CU("cuTexRefSetAddress2D_v3", (void *, const void *, ptr, size_t), texref, &d,
				    memory, 1024);
}

static int tensor_map(void)
{
	_Alignas(64) char out[128];
	uint64_t dims[2] = { 256, 4 }, strides[1] = { 1024 };
	uint32_t box[2] = { 16, 4 }, steps[2] = { 1, 1 };

	return CU("cuTensorMapEncodeTiled",
		  (void *, int, unsigned, ptr, const uint64_t *, const uint64_t *, const uint32_t *,
		   const uint32_t *, int, int, int, int),
		  out, 2, 2, memory, dims, strides, box, steps, 0, 0, 0, 0);
}

static int write_value(void)
{
	return CU("cuStreamWriteValue32_v2", (void *, ptr, uint32_t, unsigned), stream, memory, VALUE, 0);
}

static int attribute(void)
{
	uint64_t value[8];

	return CU("cuPointerGetAttribute", (void *, int, ptr), value, 2, memory);
}

/* What is looked at afterwards. */
enum made { NOTHING, ONE_WORD, WORDS_THERE, WORDS_ELSEWHERE };

static const struct {
	const char *name;
	int (*call)(void);
	enum made made;
	bool named; /* the call unmaps the memory itself, once it is named */
} calls[] = {
	{ "cuGraphAddMemcpyNode-to", copy_node_to, WORDS_THERE, false },
	{ "cuGraphAddMemcpyNode-from", copy_node_from, WORDS_ELSEWHERE, false },
	{ "cuGraphAddMemsetNode", set_node, WORDS_THERE, false },
	{ "cuGraphMemcpyNodeSetParams", copy_node_set, WORDS_THERE, false },
	{ "cuGraphMemsetNodeSetParams", set_node_set, WORDS_THERE, false },
	{ "cuGraphExecMemcpyNodeSetParams", copy_exec_set, WORDS_THERE, false },
	{ "cuGraphExecMemsetNodeSetParams", set_exec_set, WORDS_THERE, false },
	{ "cuGraphAddNode-memcpy", any_copy_node, WORDS_THERE, false },
	{ "cuGraphAddNode-memset", any_set_node, WORDS_THERE, false },
	{ "cuGraphAddKernelNode", kernel_node, WORDS_THERE, false },
	{ "cuGraphAddBatchMemOpNode", mem_op_node, ONE_WORD, false },
	{ "captured-memcpy", captured_copy, WORDS_THERE, false },
	{ "captured-memset", captured_set, WORDS_THERE, false },
	{ "cuGraphInstantiate-memcpy", instantiate_copy, WORDS_THERE, true },
	{ "cuGraphInstantiate-memset", instantiate_set, WORDS_THERE, true },
	{ "cuGraphExecUpdate-memcpy", update, WORDS_THERE, true },
	{ "cuGraphUpload-memcpy", upload_copy, WORDS_THERE, true },
	{ "cuTexObjectCreate-linear", object_linear, NOTHING, false },
	{ "cuTexObjectCreate-pitch2d", object_pitch, NOTHING, false },
	{ "cuTexRefSetAddress", reference_linear, NOTHING, false },
	{ "cuTexRefSetAddress2D", reference_2d, NOTHING, false },
	{ "cuTensorMapEncodeTiled", tensor_map, NOTHING, false },
	{ "cuStreamWriteValue32", write_value, NOTHING, false },
	{ "cuPointerGetAttribute", attribute, NOTHING, false },
};

/* ---- one process ---- */

struct outcome {
	bool called, used_it;
	int call, used;
	bool right;
};

static bool right_data(enum made made)
{
	ptr from = made == WORDS_ELSEWHERE ? other : memory;
	unsigned n = made == ONE_WORD ? 1 : WORDS;
	/* What a copy from the memory brings are the zeros that map() leaves there. */
	uint32_t value = made == WORDS_ELSEWHERE ? 0 : VALUE;

	memset(host, 0xff, sizeof(host));
	if (CU("cuMemcpyDtoH_v2", (void *, ptr, size_t), host, from, n * 4) != 0)
		return false;
	for (unsigned i = 0; i < n; i++)
		if (host[i] != value)
			return false;
	return true;
}

static void one(size_t i, bool unmapped, struct outcome *out)
{
	size_t nodes = 0;

	alarm(LIMIT_S);
	open_driver();
	away = unmapped && calls[i].named;
	if (unmapped)
		unmap();
	out->call = calls[i].call();
	out->called = true;
	if (!unmapped)
		return;
	map();
	if (out->call == 0 && !exec && CU("cuGraphGetNodes", (void *, void **, size_t *), graph, NULL, &nodes) == 0 &&
	    nodes)
		out->used = instantiate();
	if (out->call == 0 && exec && !out->used)
		out->used = CU("cuGraphLaunch", (void *, void *), exec, stream);
	if (!out->used)
		out->used = CU("cuCtxSynchronize", (void));
	out->used_it = true;
	out->right = out->call == 0 && out->used == 0 && right_data(calls[i].made);
}

static struct outcome in_a_process(size_t i, bool unmapped, int *status)
{
	struct outcome *shared = mmap(NULL, sizeof(*shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS,
				      -1, 0), out;
	pid_t pid;

	if (shared == MAP_FAILED)
		exit(1);
	fflush(NULL);
	pid = fork();
	if (pid < 0)
		exit(1);
	if (pid == 0) {
		one(i, unmapped, shared);
		_exit(0);
	}
	waitpid(pid, status, 0);
	out = *shared;
	munmap(shared, sizeof(*shared));
	return out;
}

static const char *say(char *text, bool known, int result, int status)
{
	if (known && result == ABSENT)
		strcpy(text, "absent");
	else if (known)
		sprintf(text, "%d", result);
	else if (WIFSIGNALED(status))
		sprintf(text, "signal %d", WTERMSIG(status));
	else
		strcpy(text, "failed before");
	return text;
}

static bool known(const char *name)
{
	for (size_t i = 0; i < sizeof(calls) / sizeof(calls[0]); i++)
		if (strcmp(calls[i].name, name) == 0)
			return true;
	return false;
}

int main(int argc, char **argv)
{
	for (int k = 1; k < argc; k++)
		if (!known(argv[k])) {
			fprintf(stderr, "names-memory: no call %s; without arguments all are listed\n", argv[k]);
			return 2;
		}
	for (size_t i = 0; i < sizeof(calls) / sizeof(calls[0]); i++) {
		struct outcome mapped, unmapped;
		char a[32], b[32], c[32];
		bool wanted = argc < 2;
		int s, t;

		for (int k = 1; k < argc; k++)
			wanted = wanted || strcmp(argv[k], calls[i].name) == 0;
		if (!wanted)
			continue;
		mapped = in_a_process(i, false, &s);
		unmapped = in_a_process(i, true, &t);
		printf("%s mapped=%s unmapped=%s used=%s data=%s\n", calls[i].name,
		       say(a, mapped.called, mapped.call, s), say(b, unmapped.called, unmapped.call, t),
		       say(c, unmapped.used_it, unmapped.used, t),
		       calls[i].made == NOTHING || unmapped.call != 0 ? "-" : unmapped.right ? "right" : "wrong");
		fflush(stdout);
	}
	return 0;
}
