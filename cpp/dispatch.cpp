#include "dispatch.hpp"

#include <stdexcept>

#include "cpuid.hpp"

namespace weightpath {
namespace {

[[maybe_unused]] constexpr const char* NOT_COMPILED =
    "not in this build: the compiler lacks it, or the processor is of another family";

Candidate avx512_vnni() {
#ifdef WEIGHTPATH_AVX512_VNNI
  const Features& cpu = features();
  if (!cpu.avx512) return {"avx512-vnni", nullptr, "the CPU has no AVX-512 (F, BW, VL, DQ)"};
  if (!cpu.avx512_vnni) return {"avx512-vnni", nullptr, "the CPU has AVX-512 without VNNI"};
  if (!cpu.os_avx512) {
    return {"avx512-vnni", nullptr, "the operating system does not save AVX-512 registers"};
  }
  return {"avx512-vnni", &AVX512_VNNI, ""};
#else
  return {"avx512-vnni", nullptr, NOT_COMPILED};
#endif
}

Candidate amx_int8() {
#ifdef WEIGHTPATH_AMX
  const Candidate quantizes = avx512_vnni();
  if (!quantizes.use) return {"amx-int8", nullptr, quantizes.refusal};
#ifndef WEIGHTPATH_EMULATED_AMX
  if (!features().amx_int8) return {"amx-int8", nullptr, features().amx_refusal};
#endif
  return {"amx-int8", &AMX_INT8, ""};
#else
  return {"amx-int8", nullptr, NOT_COMPILED};
#endif
}

Candidate avx2() {
#ifdef WEIGHTPATH_AVX2
  const Features& cpu = features();
  if (!cpu.avx2 || !cpu.fma || !cpu.f16c) {
    return {"avx2", nullptr, "the CPU has no AVX2 with FMA and F16C"};
  }
  if (!cpu.os_avx) return {"avx2", nullptr, "the operating system does not save AVX registers"};
  return {"avx2", &AVX2, ""};
#else
  return {"avx2", nullptr, NOT_COMPILED};
#endif
}

Candidate avx2_vnni() {
#ifdef WEIGHTPATH_AVX2_VNNI
  const Features& cpu = features();
#ifdef WEIGHTPATH_EMULATED_AVX_VNNI
  if (!cpu.avx512 || !cpu.avx512_vnni || !cpu.os_avx512) {
    return {"avx2-vnni", nullptr, "this build emulates it by AVX-512 VNNI, which cannot run here"};
  }
#else
  if (!cpu.avx_vnni) return {"avx2-vnni", nullptr, "the CPU has no AVX-VNNI"};
#endif
  const Candidate registers = avx2();
  if (!registers.use) return {"avx2-vnni", nullptr, registers.refusal};
  return {"avx2-vnni", &AVX2_VNNI, ""};
#else
  return {"avx2-vnni", nullptr, NOT_COMPILED};
#endif
}

Candidate neon_i8mm() {
#ifdef WEIGHTPATH_NEON_I8MM
  if (!features().dotprod) return {"neon-i8mm", nullptr, "the CPU has no FEAT_DotProd"};
  if (!features().i8mm) return {"neon-i8mm", nullptr, "the CPU has no FEAT_I8MM"};
  return {"neon-i8mm", &NEON_I8MM, ""};
#else
  return {"neon-i8mm", nullptr, NOT_COMPILED};
#endif
}

Candidate neon_dotprod() {
#ifdef WEIGHTPATH_NEON_DOTPROD
  if (!features().dotprod) return {"neon-dotprod", nullptr, "the CPU has no FEAT_DotProd"};
  return {"neon-dotprod", &NEON_DOTPROD, ""};
#else
  return {"neon-dotprod", nullptr, NOT_COMPILED};
#endif
}

}  // namespace

const std::vector<Candidate>& candidates() {
  static const std::vector<Candidate> all = {
      amx_int8(),  avx512_vnni(),  avx2_vnni(),           avx2(),
      neon_i8mm(), neon_dotprod(), {"scalar", &SCALAR, ""}};
  return all;
}

const InstructionSet& choose(const std::string& name, int64_t rows) {
  std::string known;
  for (const Candidate& candidate : candidates()) {
    if (name.empty() ? candidate.use && rows >= candidate.use->fewest_rows
                     : name == candidate.name) {
      if (candidate.use) return *candidate.use;
      throw std::invalid_argument(name + ": " + candidate.refusal);
    }
    known += (known.empty() ? "" : ", ") + std::string(candidate.name);
  }
  throw std::invalid_argument("instruction set '" + name + "': unknown; there are " + known);
}

}  // namespace weightpath
