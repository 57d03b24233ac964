// SPDX-License-Identifier: Apache-2.0
/* uuid.h: a GPU's UUID as text: "GPU-51600000-0000-4000-8000-000000000001", as the driver has it. */
#ifndef NVSHARE_UUID_H
#define NVSHARE_UUID_H

#include <stdbool.h>
#include <stdint.h>

#include "wire.h"

#define NVS_UUID_TEXT 40 /* bytes, without the NUL */

static inline int nvs_hex_digit(char c)
{
	if (c >= '0' && c <= '9')
		return c - '0';
	c |= 0x20;
	return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

/* Takes what comes after the first '-', and passes over what is no digit. */
static inline bool nvs_uuid_parse(const char *text, uint8_t *uuid)
{
	const char *p = text;
	unsigned n = 0;

	while (*p && *p != '-')
		p++;
	for (; *p && n < 2 * NVS_UUID_SIZE; p++) {
		int d = nvs_hex_digit(*p);

		if (d < 0)
			continue;
		uuid[n / 2] = (uint8_t)(n % 2 ? uuid[n / 2] | d : d << 4);
		n++;
	}
	return n == 2 * NVS_UUID_SIZE;
}

static inline void nvs_uuid_format(char text[NVS_UUID_TEXT + 1], const uint8_t *uuid)
{
	static const char form[] = "GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx";
	unsigned n = 0;

	for (unsigned i = 0; i < sizeof(form); i++) {
		text[i] = form[i];
		if (form[i] != 'x')
			continue;
		text[i] = "0123456789abcdef"[n % 2 ? uuid[n / 2] & 15 : uuid[n / 2] >> 4];
		n++;
	}
}

#endif
