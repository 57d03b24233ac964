// SPDX-License-Identifier: Apache-2.0
/* opening.c: a library that calls look_test.c while it is loaded; built as libopening.so. */

void opening(void); /* of the test */

static __attribute__((constructor)) void begin(void)
{
	opening();
}
