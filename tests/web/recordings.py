"""Recordings of 1.5 s of silence as ffmpeg writes them: bytes of whole files, packed.

`WEBM` has its duration in its header, `WEBM_LIVE` none, as a browser's recorder; `M4A` is an ordinary file,
`MP4_IN_PIECES` a fragmented one. Opus at 48 kHz in webm, AAC in the others.
"""

from __future__ import annotations

import base64
import zlib
from typing import Final


def _unpacked(*text: str) -> bytes:
    return zlib.decompress(base64.b85decode("".join(text)))


WEBM: Final = _unpacked(
    "c-pnp?@Lor7zglk<_^`1C<CLSh=N`eG&aGoAlR<E(4gzeyBYR_oZB1`hH;zGi(qG)+svfKh$xM1jv&hftr>MGj1ugHFM1KK7ZSb@",
    "3ktG`ipaWmyI;aTpoeqe^KiI_hr^e%Nqkqx3JFey@7ni;n}x4@r4Wsu54Lp(Nv-YXrVVl=M2TMJu4<|O+!IOdmG8xCTtn^hFwa-I",
    "^`4Q_T33?P%UZY2^CBb<N2yS0H_NKF88x?lteity$p0#Rs<B-&qp>xDU5fM_^mVoGskPX&WvxBpSl&B(Qugat%fIR4&yN_>9iQP;",
    "nN0n9?>Jhz^X%9FC)<kyvGAEdijzdbangOrD>vVb`7OC-HEw?Ski@uYE}iAHn6fW)mXBx)@U{NIjJq?e90>XXl-ARTTHevGrlcr2",
    "|3oA-byF-P#l{A=Q*3f3mk*~XWB!R=|GzOpQ+ctFa(bH_9+$h(nao(N`}AeA)LHAT<sw@f#>0ZTz)2y=35oppv!tU2*a_?h4g*2p",
    "0?-HKfg<n<m<1LMPzG!Sb^{K;3!DNj0%_nj@EDi|=74VoOsjw`fDI6V7N7&*z%^h9cnZ7*=7FCEs#XKrfI7ehoB+-O-M|gtKJXlP",
    "1AG8}8!%S`JAl1_1o(h3&;#58MuAD-E%3<zqX6>5kROKpFyx0JKMeU{$PYt)81lo)`N?JS8fS^de!e0+7$?(9t@=xmR<AtZ<k2PV",
    "MOuu~>}Ou}7X~g$PX",
)
WEBM_LIVE: Final = _unpacked(
    "c-p<u-%FEG9LMqVY>Vt7`auf|BI>H5B!zxl6l{+^kkFd7X#_^;HfMyfnCk}=JZGERAcaJ_C<QlHglR(IqF6zpfkC_IBD^We3)xK<",
    "{iLGMo@efTv45a1=fLa3fy0;Yccb<pJFF(8qW(1QS7}qf$tpD(zZhumQj<pPk(O$Y9#j^WYK?2Kd(4%;<{69I8%H}l<1(|9)_W(;",
    "8mZvQ_Zn%fcPi)^k1G2<DWX)J;y;zy)!iMl4`QoShfD7}+;*X3Z(U8Tady`ocUESz=lO|phpn?x3BOE5Lx29ZKJ2y+NwGCI6pNhm",
    "r=&<EoTuDP&7PKfF<(u(B_Fp<Pl}kd%=HgTC6{s(L!~d;{c^Q$WWXJYgbxMU{ED()(etGja~|1nIPH6`2WM_+*`#))-rb-bYe-gh",
    "w7LFK#QC%+MK&pg(0?s1n6QKG;2<~(0^l;}0~wG5ufTior3_^m*Z_6`Cujy|z*W!>?tmwt0Or7tGAt{=CQu7BZ~}Az32uN<@C>{G",
    "^Wb+G)|Frj*aI5DNpK$YfScexcwwTnL2EH;eOs}@bzmDf0GfawTmroy4JN@1cn3Z+RvV}WJAnguK_|EZu7lg)F?bC=g6}5M0~uqm",
    "Rl?w)Tpk&Ti^9U`f09ZmQ~",
)
M4A: Final = _unpacked(
    "c-rk0%Sr<=aI$UHgGvQO(Fzsptu1vaMQ;@mJ?KgFAYRgDx2;XO%O)-8X^;ICzd^kD8RAXwFX|-S($p7tci18G%1q|50{}T+-G%4X",
    "!#sck`s~O+Ai4ms;76VZKn?_>>eYcWI%wA1vb$g2tGM7)>dRy!KmU*4BS3mf1i=6c$;F_}U<Oj}0GSscpuZ`QS*y={9exD|{T{1`",
    "c9FhOT@y3))f>jOWaRI0cRi*go;i<8HNBzzrjxtQlVBZ+L|(AZxj)80w(FPAhAFifk0u%!^n14D1@i2a_89lHjnfvLo{vOUiW#T7",
    "Y%I^Q$n&if7W)y;k7=hURf8jaE0tuH&9w-t^h??VvdL35)I7<gX<Hn}1yrW-T(7Sg%cUW}+))N4nU&$y8_Xd^9G$vUrc6m|;KY>2",
    "L?ODOIebaeimdT8(N|G-Z)K?EI$Zi6f5cU(nt@f%BI2fOg-kP1z<JUKG8&ocH(DV~HCFYZ(PxU9+3?h4Hg@bm#o>-<7;<}9OP%rG",
    "P<T**e#SO#O*$DW+?_t|&OKM}&JQtxfSv",
)
MP4_IN_PIECES: Final = _unpacked(
    "c-p;Gy=ogl5S~5BPLmiJq{M{-3fSOAK@zr5sWOF|5RxKEk(2fg9lq6x-I1_d1eJc3K;9sPxNsHn0%=kh41NsH?CI>)S(b63EVr7U",
    "o!y=9o6!Qmc8HT<WRe2_4_MM{so{Qu?4K%0#sCnjabLpRC|p?~>~}lFd{o}<z|!H-hF_@tBho+Pk-f99<aFy3kG@xYQZn*MsVbSr",
    "^<&Dv@6WAK>&sYYD<&BY+{kxi%QyZ&#sSBObrlUlQc6b69l9e^|F+aY=%n{_q~q#L|81}vll*GXNGE1Mh4Ak{5>UEL6<UFj#+GC{",
    "o$k_Nk>ra`#YR3m<+(<lwawEHm#|KnAey1vMUCLZ*vt`)lR4R@=h$VkPjW<4OfPZlJv9!FnOf9VW|`*;)E!A=WFJ+48NydC-Bcp&",
    "4~Mb4sTReClivM?319kB`gXHD{LmkVt>)_nef1{U=hVEm9xCj+oPMVUv-Lpsd(ck(MP9FXGo%<w%%zN|xdA+OZ_)h2@sMs@)to3o",
    "_|Ic(J;K&(TWnsvvmv&sPgXVQV!41k=H_q-dBw%#eMx<mJjlr7vi2F=DsjxPENX<p1C4MGmNTajgwqJC>;cjFk6cA6)clWnizLPT",
    "!&AsT)_;W%PKi0)=Qpmi%yp5vh<u&B6VWv*i>ui",
)
