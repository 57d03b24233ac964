# SPDX-License-Identifier: Apache-2.0
"""A program that fills and copies memory through Vulkan, on a queue for graphics, without a screen and without CUDA."""
import ctypes
import struct
import time

BYTES, AHEAD, SECONDS = 256 << 20, 4, 0.003
NVIDIA = 0x10DE
# A host without the loader, or whose loader is not told of the driver, has the driver's own libraries.
LOADER, DRIVERS = "libvulkan.so.1", ("libEGL_nvidia.so.0", "libGLX_nvidia.so.0")
VK_TIMEOUT, WHOLE, FOREVER = 2, 2**64 - 1, 2**64 - 1
INSTANCE, QUEUE, DEVICE, SUBMIT, ALLOCATE, FENCE, BUFFER, POOL, COMMANDS, BEGIN, BARRIER = 1, 2, 3, 4, 5, 8, 12, 39, 40, 42, 46
GRAPHICS, DEVICE_LOCAL, TRANSFER_SOURCE, TRANSFER_TARGET, MAY_RECORD_AGAIN, MAY_BE_PENDING_TWICE = 1, 1, 1, 2, 2, 4
TRANSFER_STAGE, TRANSFER_READ, TRANSFER_WRITE = 0x1000, 0x800, 0x1000


class Gone(Exception):
    """Vulkan cannot be used on this host; it says why."""


def structure(kind, layout, *fields):
    """A structure of Vulkan's. All begin with their type, and with a pointer to a next one. What it points to lives as long as it does."""
    made = ctypes.create_string_buffer(struct.pack("@IP" + layout + "0P", kind, 0, *[f if isinstance(f, int) else ctypes.addressof(f) for f in fields]))
    made.fields = fields
    return made


class Vulkan:
    """The functions of an instance."""

    def __init__(self, library):
        try:
            opened = ctypes.CDLL(library)
            self.address = opened.vkGetInstanceProcAddr if library == LOADER else opened.vk_icdGetInstanceProcAddr
            if library != LOADER:
                opened.vk_icdNegotiateLoaderICDInterfaceVersion(ctypes.byref(ctypes.c_uint32(5)))
        except (OSError, AttributeError) as e:
            raise Gone(str(e)) from e
        self.address.restype, self.instance = ctypes.c_void_p, None
        self.instance = self.new("vkCreateInstance", structure(INSTANCE, "IPIPIP", 0, 0, 0, 0, 0, 0), None)

    def entry(self, name, result=ctypes.c_int):
        """A function. All of its arguments are pointers and whole numbers, and each of these takes 64 bits where C has it."""
        address = self.address(ctypes.c_void_p(self.instance), name.encode())
        if not address:
            raise Gone(f"{name} is missing")
        f = ctypes.CFUNCTYPE(result)(address)
        return lambda *arguments: f(*[ctypes.c_uint64(a) if isinstance(a, int) else a for a in arguments])

    def do(self, name, *arguments):
        result = self.entry(name)(*arguments)
        if result:
            raise Gone(f"{name} fails ({result})")

    def tell(self, name, *arguments):
        self.entry(name, None)(*arguments)

    def new(self, name, *arguments):
        """What a function makes, whose last argument says where to write it."""
        handle = ctypes.c_uint64()
        self.do(name, *arguments, ctypes.byref(handle))
        return handle.value

    def all(self, name, size, of, result=ctypes.c_int):
        """What a function lists, as bytes for each."""
        f, n = self.entry(name, result), ctypes.c_uint32()
        f(of, ctypes.byref(n), None)
        listed = ctypes.create_string_buffer(size * n.value)
        f(of, ctypes.byref(n), listed)
        return [listed.raw[i * size:(i + 1) * size] for i in range(n.value)]


def gpu():
    """The functions, the first GPU of NVIDIA's, and its name."""
    why = []
    for library in (LOADER, *DRIVERS):
        try:
            vk = Vulkan(library)
            for p in vk.all("vkEnumeratePhysicalDevices", 8, vk.instance):
                p, about = struct.unpack("Q", p)[0], ctypes.create_string_buffer(4096)
                vk.tell("vkGetPhysicalDeviceProperties", p, about)
                vendor, _, _, name = struct.unpack_from("III256s", about, 8)
                if vendor == NVIDIA:
                    return vk, p, name.partition(b"\0")[0].decode()
                why.append(f"{library}: a device of vendor {vendor:#x}")
        except Gone as e:
            why.append(f"{library}: {e}")
    raise Gone("; ".join(why) or "there is no device")


def begin():
    """Returns the name of the GPU, and a function that submits some moves of memory and returns how many have ended since."""
    vk, physical, name = gpu()
    families = vk.all("vkGetPhysicalDeviceQueueFamilyProperties", 24, physical, result=None)
    family = next((i for i, f in enumerate(families) if struct.unpack_from("I", f)[0] & GRAPHICS), None)
    if family is None:
        raise Gone(f"{name} has no queue for graphics")
    priority = ctypes.c_float(1)
    queues = structure(QUEUE, "IIIP", 0, family, 1, priority)
    device = vk.new("vkCreateDevice", physical, structure(DEVICE, "IIPIPIPP", 0, 1, queues, 0, 0, 0, 0, 0), None)
    queue = ctypes.c_uint64()
    vk.tell("vkGetDeviceQueue", device, family, 0, ctypes.byref(queue))
    kinds = ctypes.create_string_buffer(1024)
    vk.tell("vkGetPhysicalDeviceMemoryProperties", physical, kinds)

    def memory():
        buffer = vk.new("vkCreateBuffer", device, structure(BUFFER, "IQIIIP", 0, BYTES, TRANSFER_SOURCE | TRANSFER_TARGET, 0, 0, 0), None)
        needs = ctypes.create_string_buffer(24)
        vk.tell("vkGetBufferMemoryRequirements", device, buffer, needs)
        size, _, allowed = struct.unpack_from("QQI", needs)
        kind = next((i for i in range(32) if allowed >> i & 1 and struct.unpack_from("I", kinds, 4 + 8 * i)[0] & DEVICE_LOCAL), None)
        if kind is None:
            raise Gone(f"{name} has no memory for a buffer")
        vk.do("vkBindBufferMemory", device, buffer, vk.new("vkAllocateMemory", device, structure(ALLOCATE, "QI", size, kind), None), 0)
        return buffer

    source, target = memory(), memory()
    pool = vk.new("vkCreateCommandPool", device, structure(POOL, "II", MAY_RECORD_AGAIN, family), None)
    commands = ctypes.c_uint64(vk.new("vkAllocateCommandBuffers", device, structure(COMMANDS, "QII", pool, 0, 1)))
    whole = ctypes.create_string_buffer(struct.pack("QQQ", 0, 0, BYTES))
    barrier = structure(BARRIER, "II", TRANSFER_READ | TRANSFER_WRITE, TRANSFER_READ | TRANSFER_WRITE)

    def record(moves):
        def ordered(name, *arguments):
            vk.tell(name, commands.value, *arguments)
            vk.tell("vkCmdPipelineBarrier", commands.value, TRANSFER_STAGE, TRANSFER_STAGE, 0, 1, barrier, 0, None, 0, None)
        vk.do("vkBeginCommandBuffer", commands.value, structure(BEGIN, "IP", MAY_BE_PENDING_TWICE, 0))
        for i in range(moves):
            ordered("vkCmdFillBuffer", source, 0, WHOLE, i)
            ordered("vkCmdCopyBuffer", source, target, 1, whole)
        vk.do("vkEndCommandBuffer", commands.value)

    batch = structure(SUBMIT, "IPPIPIP", 0, 0, 0, 1, commands, 0, 0)
    fences = [ctypes.c_uint64(vk.new("vkCreateFence", device, structure(FENCE, "I", 0), None)) for _ in range(AHEAD)]
    submit, wait, reset = (vk.entry(f) for f in ("vkQueueSubmit", "vkWaitForFences", "vkResetFences"))

    def must(result):
        if result:
            raise RuntimeError(f"Vulkan fails ({result})")

    def start(fence):
        must(submit(queue.value, 1, batch, fence.value))

    def end(fence):
        while (result := wait(device, 1, ctypes.byref(fence), 1, 1_000_000_000)) == VK_TIMEOUT:
            pass
        must(result)
        must(reset(device, 1, ctypes.byref(fence)))

    def seconds():
        began = time.monotonic()
        start(fences[0])
        end(fences[0])
        return time.monotonic() - began

    # As many moves as take some milliseconds, however fast the GPU is.
    moves = 1
    record(moves)
    while min(seconds() for _ in range(3)) < SECONDS:
        moves *= 2
        record(moves)
    pending = []

    def step():
        full = len(pending) == AHEAD
        fence = pending.pop(0) if full else fences[len(pending)]
        if full:
            end(fence)
        start(fence)
        pending.append(fence)
        return moves if full else 0
    return name, step
