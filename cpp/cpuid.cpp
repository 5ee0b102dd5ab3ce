// cpuid leaves 1 and 7 (Intel's SDM volume 2A, AMD's APM volume 3), XCR0 by xgetbv, and AMX
// permission by arch_prctl (Linux, Documentation/arch/x86/xstate.rst). aarch64: AT_HWCAP and
// AT_HWCAP2 on Linux (Documentation/arch/arm64/elf_hwcaps.rst), sysctl's hw.optional.arm on macOS.

#include "cpuid.hpp"

#include <cerrno>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace weightpath {
namespace {

#if defined(__x86_64__)
bool bit(uint32_t word, int index) { return (word >> index) & 1; }

uint64_t enabled_states() {
  uint32_t low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return static_cast<uint64_t>(high) << 32 | low;
}

void ask_for_amx(Features& found, bool has_tile, bool has_int8, uint64_t states) {
  if (!has_tile || !has_int8) {
    found.amx_refusal = "the CPU has no AMX int8";
    return;
  }
  if ((states >> 17 & 3) != 3) {
    found.amx_refusal = "the operating system does not save AMX tiles (XCR0 bits 17 and 18)";
    return;
  }
#if defined(__linux__)
  constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
  if (syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) != 0) {
    const int code = errno;
    found.amx_refusal = std::string("Linux refused AMX tile data (ARCH_REQ_XCOMP_PERM): ")
        + (code == ENOSPC ? "a thread's alternate signal stack is too small to hold the tiles"
           : code == EINVAL ? "this kernel does not know the request; it came with Linux 5.16"
                            : std::strerror(code));
    return;
  }
  found.amx_int8 = true;
#else
  found.amx_refusal = "AMX is asked for on Linux only";
#endif
}
#endif

#if defined(__aarch64__) && defined(__APPLE__)
bool says(const char* name) {
  int value = 0;
  size_t size = sizeof value;
  return sysctlbyname(name, &value, &size, nullptr, 0) == 0 && value == 1;
}
#endif

Features read_features() {
  Features found;
#if defined(__x86_64__)
  found.amx_refusal = "the CPU has no AMX int8";
  uint32_t a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d)) return found;
  const bool saves = bit(c, 27);  // OSXSAVE: xgetbv may be used
  const uint64_t states = saves ? enabled_states() : 0;
  found.os_avx = (states & 0x6) == 0x6;
  found.os_avx512 = (states & 0xE6) == 0xE6;
  found.fma = bit(c, 12);
  found.f16c = bit(c, 29);
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return found;
  found.avx2 = bit(b, 5);
  found.avx512 = bit(b, 16) && bit(b, 17) && bit(b, 30) && bit(b, 31);
  found.avx512_vnni = bit(c, 11);
  const bool tile = bit(d, 24), int8 = bit(d, 25), bf16 = bit(d, 22);
  const uint32_t subleaves = a;
  if (subleaves >= 1 && __get_cpuid_count(7, 1, &a, &b, &c, &d)) {
    found.avx_vnni = bit(a, 4);
    found.avx512_bf16 = bit(a, 5);
  }
  ask_for_amx(found, tile, int8, states);
  found.amx_bf16 = bf16 && found.amx_int8;
#else
  found.amx_refusal = "AMX is an x86-64 extension";
#if defined(__aarch64__) && defined(__linux__)
  found.dotprod = getauxval(AT_HWCAP) >> 20 & 1;
  found.i8mm = getauxval(AT_HWCAP2) >> 13 & 1;
#elif defined(__aarch64__) && defined(__APPLE__)
  found.dotprod = says("hw.optional.arm.FEAT_DotProd");
  found.i8mm = says("hw.optional.arm.FEAT_I8MM");
#endif
#endif
  return found;
}

}  // namespace

const Features& features() {
  static const Features found = read_features();
  return found;
}

}  // namespace weightpath
