# SPDX-License-Identifier: Apache-2.0
"""A program that draws pictures through OpenGL and EGL, without a screen and without CUDA."""
import ctypes

SIDE, AHEAD = 1024, 4
EGL_NONE, EGL_OPENGL_API, EGL_PLATFORM_DEVICE = 0x3038, 0x30A2, 0x313F
EGL_SURFACE_TYPE, EGL_PBUFFER_BIT, EGL_RENDERABLE_TYPE, EGL_OPENGL_BIT = 0x3033, 1, 0x3040, 8
EGL_MAJOR, EGL_MINOR = 0x3098, 0x30FB
GL_FRAMEBUFFER, GL_COLOR_ATTACHMENT0, GL_FRAMEBUFFER_COMPLETE, GL_RENDERBUFFER, GL_RGBA8 = 0x8D40, 0x8CE0, 0x8CD5, 0x8D41, 0x8058
GL_FRAGMENT_SHADER, GL_VERTEX_SHADER, GL_COMPILE_STATUS, GL_LINK_STATUS, GL_TRIANGLES = 0x8B30, 0x8B31, 0x8B81, 0x8B82, 4
GL_RENDERER, GL_SYNC_GPU_COMMANDS_COMPLETE, GL_TIMEOUT_EXPIRED = 0x1F01, 0x9117, 0x911B

# One triangle covers the picture. Its colour takes a loop, some 10 ms for all.
CORNERS = b"""#version 330
void main() { gl_Position = vec4(gl_VertexID == 1 ? 3.0 : -1.0, gl_VertexID == 2 ? 3.0 : -1.0, 0.0, 1.0); }
"""
COLOUR = b"""#version 330
uniform int rounds;
out vec4 colour;
void main() {
	vec2 z = gl_FragCoord.xy / 1024.0;
	for (int i = 0; i < rounds; i++)
		z = fract(vec2(z.x * z.x - z.y * z.y, 2.0 * z.x * z.y) + 0.37);
	colour = vec4(z, 0.0, 1.0);
}
"""


class Gone(Exception):
    """No picture can be drawn on this host; it says why."""


def entry(egl, name, result, *arguments):
    egl.eglGetProcAddress.restype = ctypes.c_void_p
    address = egl.eglGetProcAddress(name.encode())
    if not address:
        raise Gone(f"{name} is missing")
    return ctypes.CFUNCTYPE(result, *arguments)(address)


def context():
    """Makes a context current on the first device that has OpenGL 3.3, and returns libEGL."""
    try:
        egl = ctypes.CDLL("libEGL.so.1")
    except OSError as e:
        raise Gone(str(e)) from e
    pointer = ctypes.c_void_p
    for name, result in (("eglCreateContext", pointer), ("eglInitialize", ctypes.c_uint)):
        getattr(egl, name).restype = result
    devices, n = (pointer * 16)(), ctypes.c_int()
    if not entry(egl, "eglQueryDevicesEXT", ctypes.c_uint, ctypes.c_int, pointer, pointer)(16, devices, ctypes.addressof(n)):
        raise Gone("eglQueryDevicesEXT fails")
    display_of = entry(egl, "eglGetPlatformDisplayEXT", pointer, ctypes.c_uint, pointer, pointer)
    why = "there is no device"
    for device in devices[:n.value]:
        display = pointer(display_of(EGL_PLATFORM_DEVICE, device, None))
        if not egl.eglInitialize(display, None, None):
            why = f"eglInitialize fails ({egl.eglGetError():#x})"
            continue
        egl.eglBindAPI(EGL_OPENGL_API)
        config, found = pointer(), ctypes.c_int()
        wanted = (ctypes.c_int * 5)(EGL_SURFACE_TYPE, EGL_PBUFFER_BIT, EGL_RENDERABLE_TYPE, EGL_OPENGL_BIT, EGL_NONE)
        egl.eglChooseConfig(display, wanted, ctypes.byref(config), 1, ctypes.byref(found))
        made = egl.eglCreateContext(display, config, None, (ctypes.c_int * 5)(EGL_MAJOR, 3, EGL_MINOR, 3, EGL_NONE))
        if made and egl.eglMakeCurrent(display, None, None, pointer(made)):
            return egl
        why = f"there is no context ({egl.eglGetError():#x})"
    raise Gone(why)


def begin(rounds=500):
    """Returns the name of the renderer, and a function that draws one picture and returns 1 if one is done."""
    egl = context()
    pointer, number = ctypes.c_void_p, ctypes.c_uint

    def gl(name, *arguments, result=None):
        return entry(egl, name, result, *arguments)

    program = gl("glCreateProgram", result=number)()
    for kind, source in ((GL_VERTEX_SHADER, CORNERS), (GL_FRAGMENT_SHADER, COLOUR)):
        shader = gl("glCreateShader", number, result=number)(kind)
        gl("glShaderSource", number, ctypes.c_int, pointer, pointer)(shader, 1, ctypes.addressof(ctypes.c_char_p(source)), None)
        gl("glCompileShader", number)(shader)
        gl("glAttachShader", number, number)(program, shader)
    gl("glLinkProgram", number)(program)
    linked = ctypes.c_int()
    gl("glGetProgramiv", number, number, pointer)(program, GL_LINK_STATUS, ctypes.addressof(linked))
    if not linked.value:
        raise Gone("the shaders do not link")
    gl("glUseProgram", number)(program)
    location = gl("glGetUniformLocation", number, ctypes.c_char_p, result=ctypes.c_int)(program, b"rounds")
    gl("glUniform1i", ctypes.c_int, ctypes.c_int)(location, rounds)
    made = number()
    for what, kind in (("Renderbuffer", GL_RENDERBUFFER), ("Framebuffer", GL_FRAMEBUFFER)):
        gl(f"glGen{what}s", ctypes.c_int, pointer)(1, ctypes.addressof(made))
        gl(f"glBind{what}", number, number)(kind, made.value)
        if kind == GL_RENDERBUFFER:
            buffer = made.value
            gl("glRenderbufferStorage", number, number, ctypes.c_int, ctypes.c_int)(kind, GL_RGBA8, SIDE, SIDE)
    gl("glFramebufferRenderbuffer", number, number, number, number)(GL_FRAMEBUFFER, GL_COLOR_ATTACHMENT0, GL_RENDERBUFFER, buffer)
    if gl("glCheckFramebufferStatus", number, result=number)(GL_FRAMEBUFFER) != GL_FRAMEBUFFER_COMPLETE:
        raise Gone("the frame buffer is incomplete")
    gl("glGenVertexArrays", ctypes.c_int, pointer)(1, ctypes.addressof(made))
    gl("glBindVertexArray", number)(made.value)
    gl("glViewport", *[ctypes.c_int] * 4)(0, 0, SIDE, SIDE)
    draw = gl("glDrawArrays", number, ctypes.c_int, ctypes.c_int)
    fence = gl("glFenceSync", number, number, result=pointer)
    flush = gl("glFlush")
    wait = gl("glClientWaitSync", pointer, number, ctypes.c_uint64, result=number)
    forget = gl("glDeleteSync", pointer)
    pending = []

    def step():
        draw(GL_TRIANGLES, 0, 3)
        pending.append(fence(GL_SYNC_GPU_COMMANDS_COMPLETE, 0))
        flush()
        if len(pending) < AHEAD:
            return 0
        oldest = pending.pop(0)
        while wait(oldest, 0, 1_000_000_000) == GL_TIMEOUT_EXPIRED:
            pass
        forget(oldest)
        return 1
    return gl("glGetString", number, result=ctypes.c_char_p)(GL_RENDERER).decode(), step
