// SPDX-License-Identifier: Apache-2.0
/* plugin.c: a library that uses CUDA, loaded and unloaded by plugin_test.c. */
#include "stub.h"

int plugin_begin(void);
int plugin_begin(void)
{
	void *ctx;

	return cuInit(0) ? 1 : cuCtxCreate_v2(&ctx, 0, 0);
}

int plugin_launch(void);
int plugin_launch(void)
{
	return cuLaunchKernel(0, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0);
}
