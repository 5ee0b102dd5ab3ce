// What this CPU and its operating system let a program use, and why not the rest.
#pragma once

#include <string>

namespace weightpath {

struct Features {
  bool avx2 = false, fma = false, f16c = false;  // AVX2 with what always comes with it
  bool avx_vnni = false;                         // vpdpbusd on 256 bits without AVX-512
  bool avx512 = false;                           // F, BW, VL and DQ
  bool avx512_vnni = false, avx512_bf16 = false;
  bool amx_int8 = false;                         // the CPU has it, and Linux gave permission
  bool amx_bf16 = false;                         // likewise
  bool dotprod = false, i8mm = false;            // aarch64
  bool os_avx = false, os_avx512 = false;        // the operating system saves the registers
  std::string amx_refusal;                       // why amx_int8 is false
};

// Read once; AMX permission is asked for at the first call, for this process.
const Features& features();

}  // namespace weightpath
