// SPDX-License-Identifier: Apache-2.0
/*
 * plain: a program without CUDA, for musl, static linking and other cases that cannot
 * load the shim. It uses functions that the shim interposes: look-ups, threads, fork.
 */
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

static void *thread(void *arg)
{
	return arg;
}

int main(void)
{
	int status = -1, one = 0;
	void *result = NULL;
	pthread_t t;
	pid_t pid;

#ifndef STATIC
	size_t (*length)(const char *);

	*(void **)&length = dlsym(RTLD_DEFAULT, "strlen");
	if (!length || length("four") != 4)
		return 1;
	if (dlsym(RTLD_DEFAULT, "no_such_name") || !dlerror())
		return 2;
	if (dlopen("libcuda.so.1.not.here", RTLD_NOW) || !dlerror())
		return 3;
#endif
	if (pthread_create(&t, NULL, thread, &one) || pthread_join(t, &result) || result != &one)
		return 4;
	pid = fork();
	if (pid == 0)
		_exit(7);
	if (pid < 0 || waitpid(pid, &status, 0) != pid || WEXITSTATUS(status) != 7)
		return 5;
	puts("plain: all is well");
	return 0;
}
