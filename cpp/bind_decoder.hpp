// The part of the module that bind_decoder.cpp defines.
#pragma once

#include <nanobind/nanobind.h>

void bind_decoder(nanobind::module_& module);
